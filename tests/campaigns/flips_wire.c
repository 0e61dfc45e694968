// Preloaded under the nodes of a job: flips a bit of samples that they send over TCP.
//
// A sample begins with a mark and its size. Half of those that are sent have a bit flipped, in a
// copy, until as many are on their way as WIRE_SHARED asks for: a file of two numbers of 64 bits,
// how many are wanted and how many there are.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static const char kMark[] = "nostall on wire:";
enum { MARK = sizeof kMark - 1, LARGEST = 1 << 20 };

static struct { _Atomic int64_t wanted, flips; } * shared;
static _Atomic uint64_t drawn;

__attribute__((constructor)) static void begin(void) {
  const char* path = getenv("WIRE_SHARED");
  const int fd = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  void* found = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (found != MAP_FAILED) shared = found;
}

static uint64_t draw(void) {  // splitmix64, another stream in each process
  uint64_t z =
      atomic_fetch_add(&drawn, 1) * 0x9e3779b97f4a7c15 + (uint64_t)getpid() * 0xd1342543de82ef95;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// Where a bit was flipped in the bytes, or -1.
static ssize_t flip(unsigned char* data, size_t size) {
  unsigned char* const mark = memmem(data, size, kMark, MARK);
  if (mark == NULL || draw() % 2) return -1;
  const size_t at = (size_t)(mark - data), left = size - at;
  uint32_t length = MARK;
  if (left >= MARK + sizeof length) memcpy(&length, mark + MARK, sizeof length);
  const size_t place = at + draw() % (length < left ? length : left);
  data[place] ^= (unsigned char)(1u << draw() % 8);
  return (ssize_t)place;
}

typedef ssize_t (*Sender)(int, const struct msghdr*, int);

ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
  const Sender real = (Sender)dlsym(RTLD_NEXT, "sendmsg");
  size_t size = 0;
  for (size_t i = 0; i < message->msg_iovlen; ++i) size += message->msg_iov[i].iov_len;
  if (shared == NULL || size < MARK || size > LARGEST || shared->flips >= shared->wanted) {
    return real(fd, message, flags);
  }
  unsigned char* const copy = malloc(size);
  if (copy == NULL) return real(fd, message, flags);
  size_t end = 0;
  for (size_t i = 0; i < message->msg_iovlen; ++i) {
    memcpy(copy + end, message->msg_iov[i].iov_base, message->msg_iov[i].iov_len);
    end += message->msg_iov[i].iov_len;
  }
  const ssize_t place = flip(copy, size);
  struct iovec whole = {copy, size};
  struct msghdr changed = *message;
  changed.msg_iov = &whole;
  changed.msg_iovlen = 1;
  const ssize_t sent = real(fd, place < 0 ? message : &changed, flags);
  if (place >= 0 && sent > place) atomic_fetch_add(&shared->flips, 1);
  free(copy);
  return sent;
}

ssize_t send(int fd, const void* data, size_t size, int flags) {
  struct iovec all = {(void*)(uintptr_t)data, size};
  struct msghdr message = {.msg_iov = &all, .msg_iovlen = 1};
  return sendmsg(fd, &message, flags);
}
