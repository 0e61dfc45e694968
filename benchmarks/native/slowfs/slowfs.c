/* nostall-slowfs: a read-only view of a directory that is as slow as it is told to be.
 *
 * One daemon is one client of an emulated shared file system. It serves a backing directory through
 * FUSE, and every transfer is paced twice: by the client's own link (bandwidth b1) and by the link
 * that all clients share (aggregate B). Both are kept in a page of shared memory (page.h) as the
 * time at which the link is free again. A request books its time on both with one atomic step each,
 * hence in order of arrival, and then sleeps outside any lock until its booking ends. A link left
 * idle keeps at most `burst` of credit, so that timer slack does not eat bandwidth.
 *
 * With servers the aggregate is theirs, in equal parts, instead of one link's. Files are striped over
 * them. Each has a head: a read that does not begin where the last one booked there ended costs a
 * seek. Reads are served as they come; nothing is read ahead or sorted.
 *
 * Latency is added to getattr, open, readdir and read, after the booking, so it overlaps
 * between requests in flight as a network's does. Files are opened with keep_cache off: the kernel
 * forgets a file's pages at each open, as if data were larger than memory, unless --keep-cache. */
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
  unsigned client, servers;
  unsigned long bandwidth, aggregate, ops; /* bytes/s, bytes/s, operations/s; 0: unlimited */
  unsigned long latency_us, ttl_ms;
  unsigned long stripe, seek_us; /* bytes of a file on one server before the next one's; a seek */
  int keep_cache, die_with_parent;
} set = {.ttl_ms = 1000, .stripe = 1u << 20};

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
                                          OPTION("--servers=%u", servers),
                                          OPTION("--stripe=%lu", stripe),
                                          OPTION("--seek-us=%lu", seek_us),
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

/* Books the part of a read that lies in one stripe; returns when the server is through with it. */
static uint64_t book_stripe(uint64_t inode, uint64_t at, uint64_t bytes, uint64_t now,
                            uint64_t slowdown) {
  uint64_t stripe = at / set.stripe;
  struct slowfs_server* server = &page->server[stripe % set.servers];
  /* Where it lies among the file's bytes on this server; files are far apart. */
  uint64_t place = (inode << 40) + stripe / set.servers * set.stripe + at % set.stripe;
  uint64_t cost = 0;
  if (atomic_exchange(&server->head, place + bytes) != place) {
    atomic_fetch_add(&server->seeks, 1);
    cost += (uint64_t)set.seek_us * 1000u;
  }
  if (set.aggregate) cost += cost_ns(bytes * slowdown * set.servers, set.aggregate);
  return book(&server->free_at_ns, now, cost);
}

static uint64_t book_servers(uint64_t inode, uint64_t at, uint64_t bytes, uint64_t now,
                             uint64_t slowdown) {
  uint64_t until = now;
  for (uint64_t end = at + bytes; at < end;) {
    uint64_t rest = set.stripe - at % set.stripe, part = end - at < rest ? end - at : rest;
    uint64_t done = book_stripe(inode, at, part, now, slowdown);
    if (done > until) until = done;
    at += part;
  }
  return until;
}

/* What a read reads; none for other operations. */
struct piece {
  uint64_t inode, at, bytes;
};

/* Accounts for one operation, and waits as long as the storage would take. */
static void pay(enum slowfs_operation op, const struct piece* piece) {
  uint64_t bytes = piece ? piece->bytes : 0;
  struct slowfs_client* me = &page->client[set.client];
  uint64_t now = now_ns(), until = now, end;
  atomic_fetch_add(&me->operations[op], 1);
  if (set.ops && (end = book(&page->op_free_at_ns, now, cost_ns(1, set.ops))) > until) until = end;
  if (bytes) {
    uint64_t slowdown = atomic_load(&page->slowdown);
    if (!slowdown) slowdown = 1;
    uint64_t units = bytes * slowdown;
    atomic_fetch_add(&me->bytes, bytes);
    if (set.bandwidth && (end = book(&me->free_at_ns, now, cost_ns(units, set.bandwidth))) > until)
      until = end;
    end = until;
    if (set.servers)
      end = book_servers(piece->inode, piece->at, bytes, now, slowdown);
    else if (set.aggregate)
      end = book(&page->free_at_ns, now, cost_ns(units, set.aggregate));
    if (end > until) until = end;
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
  pay(OP_GETATTR, NULL);
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
  pay(OP_OPEN, NULL);
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
  struct stat st = {.st_ino = 0};
  if (set.servers) fstat((int)fi->fh, &st);
  pay(OP_READ, &(struct piece){(uint64_t)st.st_ino, (uint64_t)at, got});
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
  pay(OP_READDIR, NULL);
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
  if (!set.backing || !set.page || set.client >= SLOWFS_MAX_CLIENTS ||
      set.servers > SLOWFS_MAX_SERVERS || !set.stripe) {
    fprintf(
        stderr,
        "usage: nostall-slowfs --backing=DIR --page=FILE [--client=0..%d] [--bandwidth=BYTES/s]\n"
        "  [--aggregate=BYTES/s] [--ops=N/s] [--latency-us=N] [--ttl-ms=N] [--keep-cache]\n"
        "  [--servers=0..%d] [--stripe=BYTES] [--seek-us=N] [--die-with-parent]\n"
        "  [-f] [-o ro,max_read=1048576] MOUNTPOINT\n",
        SLOWFS_MAX_CLIENTS - 1, SLOWFS_MAX_SERVERS);
    return 2;
  }
  root_fd = open(set.backing, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (root_fd < 0)
    return fprintf(stderr, "nostall-slowfs: %s: %s\n", set.backing, strerror(errno)), 1;
  if (map_page()) return fprintf(stderr, "nostall-slowfs: %s: %s\n", set.page, strerror(errno)), 1;
  if (set.die_with_parent) prctl(PR_SET_PDEATHSIG, SIGTERM);
  return fuse_main(args.argc, args.argv, &operations, NULL);
}
