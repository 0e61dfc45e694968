// Preloaded under a job: counts its calls of each kind, and fails one of them, or all from it on.
//
// Of files, the calls count that name, or have open, something under NTH_ROOT or /dev/shm; of
// memory, what code of nostall asks for while it does not hold the interpreter's lock (Python's and
// NumPy's allocations end in errors of theirs, and nanobind ends the process when there is no
// memory for the arguments of a call); of threads and rings, all.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "preloaded.h"

enum kind {
  NEW,
  THREAD,
  OPEN,
  READ,
  WRITE,
  FSYNC,
  RENAME,
  UNLINK,
  MMAP,
  ALLOCATE,
  LOCK,
  RING,
  KINDS
};
static const int errors[KINDS] = {ENOMEM, EAGAIN, EMFILE, EIO,    ENOSPC, EIO,
                                  EIO,    EIO,    ENOMEM, ENOSPC, ENOLCK, EAGAIN};

static _Atomic long counts[KINDS];
static _Atomic int armed;
static int chosen = -1, forever;
static long fail_at;
// Where the code of nostall lies.
static struct { uintptr_t begin, end; } own[8];
static int owns;

static int note(struct dl_phdr_info* info, size_t size, void* data) {
  (void)size, (void)data;
  if (strstr(info->dlpi_name, "/nostall/") == NULL || owns == 8) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)* p = &info->dlpi_phdr[i];
    if (p->p_type != PT_LOAD || !(p->p_flags & PF_X) || owns == 8) continue;
    own[owns].begin = info->dlpi_addr + p->p_vaddr;
    own[owns++].end = info->dlpi_addr + p->p_vaddr + p->p_memsz;
  }
  return 0;
}

static int (*python_runs)(void);  // in the calling thread

// From now on calls count; call `at` of `kind` fails (0: none), or all from it on.
void nth_arm(int kind, long at, int all_after) {
  owns = 0;
  python_runs = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
  dl_iterate_phdr(note, NULL);
  for (int k = 0; k < KINDS; ++k) counts[k] = 0;
  chosen = kind, fail_at = at, forever = all_after;
  armed = 1;
}
void nth_disarm(void) { armed = 0; }
long nth_count(int kind) { return counts[kind]; }

static int fails(enum kind kind) {
  if (!armed) return 0;
  const long number = ++counts[kind];
  if ((int)kind != chosen || fail_at == 0) return 0;
  if (number != fail_at && !(forever && number > fail_at)) return 0;
  errno = errors[kind];
  return 1;
}

static int watched(const char* path) {
  static const char* root;
  if (root == NULL) root = getenv("NTH_ROOT");
  return below(path, root) || below(path, "/dev/shm");
}
static int open_one(int fd) {
  char path[4096];
  return armed && path_of(fd, path) && watched(path);
}
static int at_one(int directory, const char* path) {
  if (!armed || path == NULL) return 0;
  return path[0] == '/' || directory == AT_FDCWD ? watched(path) : open_one(directory);
}

#define REAL(result, name, ...)       \
  static result (*real)(__VA_ARGS__); \
  if (real == NULL) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

// --------------------------------------------------------------------------------------- memory

static int own_caller(void* address) {
  if (!armed || python_runs == NULL || python_runs()) return 0;
  for (int i = 0; i < owns; ++i) {
    if ((uintptr_t)address >= own[i].begin && (uintptr_t)address < own[i].end) return 1;
  }
  return 0;
}
// Of a library that Python loaded for itself, where RTLD_NEXT does not look.
static void* loaded(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  void* found = handle == NULL ? NULL : dlsym(handle, name);
  if (found == NULL) abort();
  return found;
}
static void* allocate(void* caller, size_t align, size_t size) {
  void* memory = NULL;
  const int refused = own_caller(caller) && fails(NEW);
  if (!refused && posix_memalign(&memory, align, size == 0 ? 1 : size) == 0) return memory;
  ((void (*)(void))loaded("libstdc++.so.6", "_ZSt17__throw_bad_allocv"))();
  return NULL;
}
// operator new and new[], plain and aligned.
void* _Znwm(size_t size) { return allocate(__builtin_return_address(0), 16, size); }
void* _Znam(size_t size) { return allocate(__builtin_return_address(0), 16, size); }
void* _ZnwmSt11align_val_t(size_t size, size_t align) {
  return allocate(__builtin_return_address(0), align, size);
}
void* _ZnamSt11align_val_t(size_t size, size_t align) {
  return allocate(__builtin_return_address(0), align, size);
}
void* aligned_alloc(size_t align, size_t size) {
  REAL(void*, aligned_alloc, size_t, size_t);
  if (own_caller(__builtin_return_address(0)) && fails(NEW)) return NULL;
  return real(align, size);
}

// -------------------------------------------------------------------------------- threads, rings

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) {
  REAL(int, pthread_create, pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (fails(THREAD)) return errors[THREAD];
  return real(thread, attributes, start, argument);
}
int io_uring_submit_and_wait(void* ring, unsigned wait) {
  static int (*real)(void*, unsigned);
  if (real == NULL)
    real = (int (*)(void*, unsigned))loaded("liburing.so.2", "io_uring_submit_and_wait");
  if (fails(RING)) return -errors[RING];
  return real(ring, wait);
}
int io_uring_queue_init(unsigned entries, void* ring, unsigned flags) {
  static int (*real)(unsigned, void*, unsigned);
  if (real == NULL)
    real = (int (*)(unsigned, void*, unsigned))loaded("liburing.so.2", "io_uring_queue_init");
  if (fails(RING)) return -errors[RING];
  return real(entries, ring, flags);
}

// ----------------------------------------------------------------------------------------- files

#define OPEN_CALL(name)                                   \
  int name(const char* path, int flags, ...) {            \
    va_list list;                                         \
    va_start(list, flags);                                \
    const mode_t mode = va_arg(list, mode_t);             \
    va_end(list);                                         \
    REAL(int, name, const char*, int, ...);               \
    if (at_one(AT_FDCWD, path) && fails(OPEN)) return -1; \
    return real(path, flags, mode);                       \
  }
OPEN_CALL(open)
OPEN_CALL(open64)
#define OPENAT_CALL(name)                                     \
  int name(int directory, const char* path, int flags, ...) { \
    va_list list;                                             \
    va_start(list, flags);                                    \
    const mode_t mode = va_arg(list, mode_t);                 \
    va_end(list);                                             \
    REAL(int, name, int, const char*, int, ...);              \
    if (at_one(directory, path) && fails(OPEN)) return -1;    \
    return real(directory, path, flags, mode);                \
  }
OPENAT_CALL(openat)
OPENAT_CALL(openat64)

#define PAIR(...) __VA_ARGS__
#define ON_OPEN(result, failed, kind, name, parameters, types, arguments) \
  result name parameters {                                                \
    REAL(result, name, types);                                            \
    if (open_one(fd) && fails(kind)) return failed;                       \
    return real arguments;                                                \
  }
ON_OPEN(ssize_t, -1, READ, read, (int fd, void* to, size_t n), PAIR(int, void*, size_t),
        (fd, to, n))
ON_OPEN(ssize_t, -1, READ, pread, (int fd, void* to, size_t n, off_t at),
        PAIR(int, void*, size_t, off_t), (fd, to, n, at))
ON_OPEN(ssize_t, -1, READ, pread64, (int fd, void* to, size_t n, off64_t at),
        PAIR(int, void*, size_t, off64_t), (fd, to, n, at))
ON_OPEN(ssize_t, -1, READ, preadv, (int fd, const struct iovec* to, int n, off_t at),
        PAIR(int, const struct iovec*, int, off_t), (fd, to, n, at))
ON_OPEN(ssize_t, -1, READ, preadv64, (int fd, const struct iovec* to, int n, off64_t at),
        PAIR(int, const struct iovec*, int, off64_t), (fd, to, n, at))
ON_OPEN(ssize_t, -1, WRITE, write, (int fd, const void* from, size_t n),
        PAIR(int, const void*, size_t), (fd, from, n))
ON_OPEN(ssize_t, -1, WRITE, pwrite, (int fd, const void* from, size_t n, off_t at),
        PAIR(int, const void*, size_t, off_t), (fd, from, n, at))
ON_OPEN(ssize_t, -1, WRITE, pwrite64, (int fd, const void* from, size_t n, off64_t at),
        PAIR(int, const void*, size_t, off64_t), (fd, from, n, at))
ON_OPEN(int, -1, FSYNC, fsync, (int fd), int, (fd))
ON_OPEN(int, -1, FSYNC, fdatasync, (int fd), int, (fd))
ON_OPEN(int, -1, ALLOCATE, fallocate, (int fd, int mode, off_t at, off_t n),
        PAIR(int, int, off_t, off_t), (fd, mode, at, n))
ON_OPEN(int, errors[ALLOCATE], ALLOCATE, posix_fallocate, (int fd, off_t at, off_t n),
        PAIR(int, off_t, off_t), (fd, at, n))
ON_OPEN(int, errors[ALLOCATE], ALLOCATE, posix_fallocate64, (int fd, off64_t at, off64_t n),
        PAIR(int, off64_t, off64_t), (fd, at, n))
ON_OPEN(int, -1, ALLOCATE, ftruncate, (int fd, off_t n), PAIR(int, off_t), (fd, n))
ON_OPEN(int, -1, ALLOCATE, ftruncate64, (int fd, off64_t n), PAIR(int, off64_t), (fd, n))
ON_OPEN(int, -1, LOCK, flock, (int fd, int operation), PAIR(int, int), (fd, operation))

#define MAP_CALL(name, offset)                                                                    \
  void* name(void* at, size_t n, int protection, int flags, int fd, offset from) {                \
    REAL(void*, name, void*, size_t, int, int, int, offset);                                      \
    const int ours = armed && (fd >= 0 ? open_one(fd) : own_caller(__builtin_return_address(0))); \
    if (ours && fails(MMAP)) return MAP_FAILED;                                                   \
    return real(at, n, protection, flags, fd, from);                                              \
  }
MAP_CALL(mmap, off_t)
MAP_CALL(mmap64, off64_t)

#define LOCK_CALL(name)                                                                      \
  int name(int fd, int command, ...) {                                                       \
    va_list list;                                                                            \
    va_start(list, command);                                                                 \
    void* argument = va_arg(list, void*);                                                    \
    va_end(list);                                                                            \
    REAL(int, name, int, int, ...);                                                          \
    const int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || \
                      command == F_OFD_SETLKW || command == F_OFD_GETLK;                     \
    if (locks && open_one(fd) && fails(LOCK)) return -1;                                     \
    return real(fd, command, argument);                                                      \
  }
LOCK_CALL(fcntl)
LOCK_CALL(fcntl64)

int rename(const char* from, const char* to) {
  REAL(int, rename, const char*, const char*);
  if (at_one(AT_FDCWD, to) && fails(RENAME)) return -1;
  return real(from, to);
}
int unlink(const char* path) {
  REAL(int, unlink, const char*);
  if (at_one(AT_FDCWD, path) && fails(UNLINK)) return -1;
  return real(path);
}
int unlinkat(int directory, const char* path, int flags) {
  REAL(int, unlinkat, int, const char*, int);
  if (at_one(directory, path) && fails(UNLINK)) return -1;
  return real(directory, path, flags);
}
int rmdir(const char* path) {
  REAL(int, rmdir, const char*);
  if (at_one(AT_FDCWD, path) && fails(UNLINK)) return -1;
  return real(path);
}
int mkdir(const char* path, mode_t mode) {
  REAL(int, mkdir, const char*, mode_t);
  if (at_one(AT_FDCWD, path) && fails(OPEN)) return -1;
  return real(path, mode);
}
