/* The memory page that all daemons of one emulated storage share, and that the harness reads.
 *
 * A little-endian struct of 64-bit words in a regular file, mapped shared. Every field but the
 * first is updated with atomics, `slowdown` by the harness; a reader in another process sees each
 * word whole, and the words of one moment only approximately together.
 * benchmarks/nostall_bench/slowfs.py reads it by the same
 * offsets. */
#ifndef NOSTALL_SLOWFS_PAGE_H
#define NOSTALL_SLOWFS_PAGE_H

#include <stdatomic.h>
#include <stdint.h>

#define SLOWFS_MAGIC UINT64_C(0x32734674656e6f4c) /* bumped with the layout */
#define SLOWFS_MAX_CLIENTS 64
#define SLOWFS_MAX_SERVERS 64

enum slowfs_operation { OP_GETATTR, OP_OPEN, OP_READ, OP_READDIR, OP_COUNT };

/* One mount: when its own link is free again, and what it has served. */
struct slowfs_client {
  _Atomic uint64_t free_at_ns; /* CLOCK_MONOTONIC */
  _Atomic uint64_t bytes;
  _Atomic uint64_t operations[OP_COUNT];
  uint64_t unused[2];
};

/* One disk of the storage: a file's stripes go round all of them. */
struct slowfs_server {
  _Atomic uint64_t free_at_ns;
  _Atomic uint64_t head; /* where the last read booked on it ends */
  _Atomic uint64_t seeks;
  uint64_t unused[5];
};

struct slowfs_page {
  _Atomic uint64_t magic;
  _Atomic uint64_t free_at_ns;    /* when the shared link is free again */
  _Atomic uint64_t op_free_at_ns; /* when the next operation may start, under an operations limit */
  _Atomic uint64_t slowdown;      /* transfers take this many times as long; 0 is 1 */
  uint64_t unused[4];
  struct slowfs_client client[SLOWFS_MAX_CLIENTS];
  struct slowfs_server server[SLOWFS_MAX_SERVERS];
};

#endif
