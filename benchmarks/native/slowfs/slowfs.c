/* nostall-slowfs: a read-only view of a directory that is as slow as it is told to be.
 *
 * One daemon is one client of an emulated shared file system. It serves a backing directory through
 * FUSE, and every transfer is paced twice: by the client's own link (bandwidth b1) and by the link
 * that all clients share (aggregate B). Both are kept in a page of shared memory (page.h) as the
 * time at which the link is free again. A request books its time on both with one atomic step each,
 * hence in order of arrival, and then sleeps outside any lock until its booking ends. A link left
 * idle keeps at most `burst` of credit, so that timer slack does not eat bandwidth.
 *
 * Latency is added to getattr, open, readdir and read, after the booking, so it overlaps
 * between requests in flight as a network's does. Files are opened with keep_cache off: the kernel
 * forgets a file's pages at each open, as close-to-open network file systems may, unless
 * --keep-cache. */
#define FUSE_USE_VERSION 35
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "page.h"

#define MAX_READ (1u << 20)
#define BURST_NS UINT64_C(2000000)

static struct settings {
  char *backing, *page;
  unsigned client;
  unsigned long bandwidth, aggregate, ops; /* bytes/s, bytes/s, operations/s; 0: unlimited */
  unsigned long latency_us, ttl_ms;
  int keep_cache, die_with_parent;
} set = {.ttl_ms = 1000};

static struct slowfs_page* page;
static int root_fd = -1;

#define OPTION(text, field) \
  { text, offsetof(struct settings, field), 1 }
static const struct fuse_opt options[] = {OPTION("--backing=%s", backing),
                                          OPTION("--page=%s", page),
                                          OPTION("--client=%u", client),
                                          OPTION("--bandwidth=%lu", bandwidth),
                                          OPTION("--aggregate=%lu", aggregate),
                                          OPTION("--ops=%lu", ops),
                                          OPTION("--latency-us=%lu", latency_us),
                                          OPTION("--ttl-ms=%lu", ttl_ms),
                                          OPTION("--keep-cache", keep_cache),
                                          OPTION("--die-with-parent", die_with_parent),
                                          FUSE_OPT_END};

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Books `cost` ns on a link; returns when the booking ends. */
static uint64_t book(_Atomic uint64_t* free_at, uint64_t now, uint64_t cost) {
  uint64_t old = atomic_load(free_at), end;
  do {
    uint64_t earliest = now > BURST_NS ? now - BURST_NS : 0;
    end = (old > earliest ? old : earliest) + cost;
  } while (!atomic_compare_exchange_weak(free_at, &old, end));
  return end;
}

static uint64_t cost_ns(uint64_t units, unsigned long per_second) {
  return (uint64_t)((double)units * 1e9 / (double)per_second);
}

/* Accounts for one operation that moves `bytes`, and waits as long as the storage would take. */
static void pay(enum slowfs_operation op, uint64_t bytes) {
  struct slowfs_client* me = &page->client[set.client];
  uint64_t now = now_ns(), until = now, end;
  atomic_fetch_add(&me->operations[op], 1);
  if (set.ops && (end = book(&page->op_free_at_ns, now, cost_ns(1, set.ops))) > until) until = end;
  if (bytes) {
    uint64_t slowdown = atomic_load(&page->slowdown), units = bytes * (slowdown ? slowdown : 1);
    atomic_fetch_add(&me->bytes, bytes);
    if (set.bandwidth && (end = book(&me->free_at_ns, now, cost_ns(units, set.bandwidth))) > until)
      until = end;
    if (set.aggregate &&
        (end = book(&page->free_at_ns, now, cost_ns(units, set.aggregate))) > until)
      until = end;
  }
  until += (uint64_t)set.latency_us * 1000u;
  if (until <= now) return;
  struct timespec wake = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &wake, NULL) == EINTR) {
  }
}

static const char* relative(const char* path) { return path[1] ? path + 1 : "."; }

static int slow_getattr(const char* path, struct stat* st, struct fuse_file_info* fi) {
  (void)fi;
  pay(OP_GETATTR, 0);
  return fstatat(root_fd, relative(path), st, AT_SYMLINK_NOFOLLOW) ? -errno : 0;
}

static int slow_readlink(const char* path, char* to, size_t size) {
  ssize_t n = readlinkat(root_fd, relative(path), to, size - 1);
  if (n < 0) return -errno;
  to[n] = '\0';
  return 0;
}

static int slow_open(const char* path, struct fuse_file_info* fi) {
  if ((fi->flags & O_ACCMODE) != O_RDONLY) return -EROFS;
  pay(OP_OPEN, 0);
  /* O_DIRECT concerns the client's cache alone; the backing file is read as any other. */
  int fd = openat(root_fd, relative(path), (fi->flags & ~O_DIRECT) | O_CLOEXEC);
  if (fd < 0) return -errno;
  fi->fh = (uint64_t)fd;
  fi->keep_cache = set.keep_cache != 0;
  return 0;
}

static int slow_read(const char* path, char* to, size_t size, off_t at, struct fuse_file_info* fi) {
  (void)path;
  size_t got = 0;
  while (got < size) {
    ssize_t n = pread((int)fi->fh, to + got, size - got, at + (off_t)got);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -errno;
    if (n == 0) break;
    got += (size_t)n;
  }
  pay(OP_READ, got);
  return (int)got;
}

static int slow_release(const char* path, struct fuse_file_info* fi) {
  (void)path;
  close((int)fi->fh);
  return 0;
}

static int slow_readdir(const char* path, void* buffer, fuse_fill_dir_t fill, off_t at,
                        struct fuse_file_info* fi, enum fuse_readdir_flags flags) {
  (void)at, (void)fi, (void)flags;
  pay(OP_READDIR, 0);
  int fd = openat(root_fd, relative(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return -errno;
  DIR* dir = fdopendir(fd);
  if (!dir) {
    int error = errno;
    close(fd);
    return -error;
  }
  for (struct dirent* e; (e = readdir(dir));) {
    struct stat st = {.st_ino = e->d_ino, .st_mode = (mode_t)e->d_type << 12};
    if (fill(buffer, e->d_name, &st, 0, 0)) break;
  }
  closedir(dir);
  return 0;
}

static void* slow_init(struct fuse_conn_info* conn, struct fuse_config* config) {
  conn->max_read = MAX_READ; /* must equal the mount option */
  config->attr_timeout = config->entry_timeout = (double)set.ttl_ms / 1000.0;
  config->negative_timeout = config->attr_timeout;
  config->nullpath_ok = 0;
  return NULL;
}

static const struct fuse_operations operations = {.getattr = slow_getattr,
                                                  .readlink = slow_readlink,
                                                  .open = slow_open,
                                                  .read = slow_read,
                                                  .release = slow_release,
                                                  .readdir = slow_readdir,
                                                  .init = slow_init};

static int map_page(void) {
  int fd = open(set.page, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof *page)) return -1;
  page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (page == MAP_FAILED) return -1;
  atomic_store(&page->magic, SLOWFS_MAGIC);
  return 0;
}

int main(int argc, char** argv) {
  struct fuse_args args = FUSE_ARGS_INIT(argc, argv);
  if (fuse_opt_parse(&args, &set, options, NULL)) return 2;
  if (!set.backing || !set.page || set.client >= SLOWFS_MAX_CLIENTS) {
    fprintf(
        stderr,
        "usage: nostall-slowfs --backing=DIR --page=FILE [--client=0..%d] [--bandwidth=BYTES/s]\n"
        "  [--aggregate=BYTES/s] [--ops=N/s] [--latency-us=N] [--ttl-ms=N] [--keep-cache]\n"
        "  [--die-with-parent]\n"
        "  [-f] [-o ro,max_read=1048576] MOUNTPOINT\n",
        SLOWFS_MAX_CLIENTS - 1);
    return 2;
  }
  root_fd = open(set.backing, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (root_fd < 0)
    return fprintf(stderr, "nostall-slowfs: %s: %s\n", set.backing, strerror(errno)), 1;
  if (map_page()) return fprintf(stderr, "nostall-slowfs: %s: %s\n", set.page, strerror(errno)), 1;
  if (set.die_with_parent) prctl(PR_SET_PDEATHSIG, SIGTERM);
  return fuse_main(args.argc, args.argv, &operations, NULL);
}
