// Preloaded under a checkpointing process: ends it at a chosen call, and keeps what a power cut
// would leave. Calls count that change files under NOSTALL_FAULT_ROOT, in all threads together.
//
// The model of a power cut is the harshest that POSIX allows: the bytes of a file are those of its
// last fsync, the names in a directory are those of the directory's last fsync. Both are kept in
// NOSTALL_FAULT_SHADOW: "<inode>.<birth>" holds bytes, "<inode>.<birth>.names" holds lines of
// names. NOSTALL_FAULT_HANG: writes under this path sleep while the file of that name with ".hang"
// exists. NOSTALL_FAULT_FULL: writes under this path that make the tree larger than .full says fail
// (ENOSPC).
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include "../../campaigns/preloaded.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long count, end_at;

// The process ends before its `at`th call from now, a write half done; 0: only counts.
void fault_arm(long at) {
  count = 0;
  end_at = at;
}
long fault_count(void) { return count; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void hang(const char* path) {
  if (!below(path, getenv("NOSTALL_FAULT_HANG"))) return;
  char flag[4200];
  snprintf(flag, sizeof flag, "%s.hang", getenv("NOSTALL_FAULT_HANG"));
  while (access(flag, F_OK) == 0) usleep(10000);
}

static int full(const char* path) {
  if (!below(path, getenv("NOSTALL_FAULT_FULL"))) return 0;
  char flag[4200];
  snprintf(flag, sizeof flag, "%s.full", getenv("NOSTALL_FAULT_FULL"));
  return access(flag, F_OK) == 0;
}

// Begins a call on `path`; with the lock held if it counts.
static int begin(const char* path) {
  hang(path);
  if (!below(path, getenv("NOSTALL_FAULT_ROOT"))) return 0;
  pthread_mutex_lock(&lock);
  if (++count == end_at) kill(getpid(), SIGKILL);
  return 1;
}
static void end(int counted) {
  if (counted) pthread_mutex_unlock(&lock);
}

static int shadow_name(int fd, const char* suffix, char* name) {
  struct statx s;
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_INO | STATX_BTIME, &s) != 0) return 0;
  snprintf(name, 4300, "%s/%llu.%lld%09u%s", getenv("NOSTALL_FAULT_SHADOW"),
           (unsigned long long)s.stx_ino, (long long)s.stx_btime.tv_sec, s.stx_btime.tv_nsec,
           suffix);
  return 1;
}

// The name under which an open file's bytes are kept.
void fault_key(int fd, char* key) {
  char name[4400];
  key[0] = 0;
  if (shadow_name(fd, "", name)) strcpy(key, strrchr(name, '/') + 1);
}

// What is kept appears at once, and in the order of the calls, whichever of the processes is killed
// meanwhile.
static int shadow_lock(void) {
  char name[4400];
  snprintf(name, sizeof name, "%s/lock", getenv("NOSTALL_FAULT_SHADOW"));
  const int held = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  while (flock(held, LOCK_EX) != 0 && errno == EINTR) continue;
  return held;
}
static void shadow_name_partial(const char* name, char* partial) {
  snprintf(partial, 4500, "%s.%d", name, (int)getpid());
}
static void shadow_complete(const char* partial, const char* name) {
  if (syscall(SYS_renameat2, AT_FDCWD, partial, AT_FDCWD, name, 0) != 0) abort();
}

static void keep_bytes(int fd, const char* path) {
  char name[4400], partial[4500], buffer[65536];
  if (!shadow_name(fd, "", name)) return;
  shadow_name_partial(name, partial);
  const int from = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
  const int to =
      (int)syscall(SYS_openat, AT_FDCWD, partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  for (ssize_t n; from >= 0 && to >= 0 && (n = read(from, buffer, sizeof buffer)) > 0;) {
    if (syscall(SYS_write, to, buffer, n) != n) abort();
  }
  syscall(SYS_close, from);
  syscall(SYS_close, to);
  shadow_complete(partial, name);
}

static void keep_names(int fd, const char* path) {
  char name[4400], partial[4500], entry_path[4700], target[4400];
  if (!shadow_name(fd, ".names", name)) return;
  shadow_name_partial(name, partial);
  FILE* out = fopen(partial, "w");
  DIR* directory = opendir(path);
  for (struct dirent* e; out != NULL && directory != NULL && (e = readdir(directory)) != NULL;) {
    if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
    snprintf(entry_path, sizeof entry_path, "%s/%s", path, e->d_name);
    const int it = (int)syscall(SYS_openat, AT_FDCWD, entry_path, O_RDONLY | O_CLOEXEC);
    if (it < 0 || !shadow_name(it, "", target)) continue;
    fprintf(out, "%s %s %s\n", e->d_type == DT_DIR ? "d" : "f", strrchr(target, '/') + 1,
            e->d_name);
    syscall(SYS_close, it);
  }
  if (directory != NULL) closedir(directory);
  if (out == NULL) return;
  fclose(out);
  shadow_complete(partial, name);
}

static int sync_fd(int fd, int (*really)(int)) {
  char path[4096];
  if (!path_of(fd, path) || !below(path, getenv("NOSTALL_FAULT_ROOT"))) {
    hang(path);
    return really(fd);
  }
  const int counted = begin(path);
  if (getenv("NOSTALL_FAULT_SHADOW") != NULL) {
    struct stat s;
    const int held = shadow_lock();
    if (fstat(fd, &s) == 0 && S_ISDIR(s.st_mode)) {
      keep_names(fd, path);
    } else {
      keep_bytes(fd, path);
    }
    syscall(SYS_close, held);
  }
  end(counted);
  return 0;
}
int fsync(int fd) { return sync_fd(fd, REAL(fsync)); }
int fdatasync(int fd) { return sync_fd(fd, REAL(fdatasync)); }

static ssize_t half(ssize_t (*put)(int, const void*, size_t, off64_t), int fd, const void* data,
                    size_t size, off64_t at) {
  char path[4096];
  if (!path_of(fd, path)) return put(fd, data, size, at);
  if (full(path)) {
    errno = ENOSPC;
    return -1;
  }
  if (below(path, getenv("NOSTALL_FAULT_ROOT")) && count + 1 == end_at) {
    put(fd, data, size > 4096 ? size / 2 / 4096 * 4096 : size / 2, at);
  }
  const int counted = begin(path);
  const ssize_t done = put(fd, data, size, at);
  end(counted);
  return done;
}
static ssize_t put_here(int fd, const void* data, size_t size, off64_t at) {
  (void)at;
  return syscall(SYS_write, fd, data, size);
}
static ssize_t put_at(int fd, const void* data, size_t size, off64_t at) {
  return syscall(SYS_pwrite64, fd, data, size, at);
}
ssize_t write(int fd, const void* data, size_t size) { return half(put_here, fd, data, size, 0); }
ssize_t pwrite(int fd, const void* data, size_t size, off_t at) {
  return half(put_at, fd, data, size, at);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) {
  return half(put_at, fd, data, size, at);
}

int fallocate64(int fd, int mode, off64_t at, off64_t size) {
  char path[4096];
  if (path_of(fd, path) && full(path)) {
    errno = ENOSPC;
    return -1;
  }
  return (int)syscall(SYS_fallocate, fd, mode, at, size);
}
int fallocate(int fd, int mode, off_t at, off_t size) { return fallocate64(fd, mode, at, size); }

static int open_any(const char* path, int flags, va_list more) {
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  const int counted = (flags & (O_CREAT | O_TRUNC)) != 0 ? begin(path) : 0;
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
  end(counted);
  return fd;
}
int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int fd = open_any(path, flags, more);
  va_end(more);
  return fd;
}
int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int fd = open_any(path, flags | O_LARGEFILE, more);
  va_end(more);
  return fd;
}

#define COUNTED(path, call)          \
  do {                               \
    const int counted = begin(path); \
    const int result = (int)(call);  \
    end(counted);                    \
    return result;                   \
  } while (0)
int rename(const char* from, const char* to) {
  COUNTED(to, syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
int unlink(const char* path) { COUNTED(path, syscall(SYS_unlinkat, AT_FDCWD, path, 0)); }
int rmdir(const char* path) { COUNTED(path, syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR)); }
int mkdir(const char* path, mode_t mode) {
  COUNTED(path, syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}
int ftruncate64(int fd, off64_t size) {
  char path[4096];
  COUNTED(path_of(fd, path) ? path : NULL, syscall(SYS_ftruncate, fd, size));
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
