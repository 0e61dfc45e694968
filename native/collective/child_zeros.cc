// Maps zeros in a forked child, over all that its parent held of shared memory.
#include "collective/child_zeros.h"

#include <pthread.h>
#include <sys/mman.h>

#include "base/mutex.h"

namespace nostall::collective {

// Linked through its members and never destroyed: a fork may come at any time, and its child may not
// allocate.
struct ChildZeros::Registry {
  Mutex mutex;
  ChildZeros* first NOSTALL_GUARDED_BY(mutex) = nullptr;

  static Registry& get() {
    static Registry registry;
    static const int watched = ::pthread_atfork(before_fork, after_fork, in_child);
    static_cast<void>(watched);
    return registry;
  }

  // Held over the fork, so that the child finds the links whole.
  static void before_fork() NOSTALL_UNCHECKED { get().mutex.lock(); }
  static void after_fork() NOSTALL_UNCHECKED { get().mutex.unlock(); }
  static void in_child() NOSTALL_UNCHECKED {
    get().map_zeros();
    get().mutex.unlock();
  }

  // In a child. What is mapped already came from a fork before this one, and is kept as it is.
  void map_zeros() noexcept NOSTALL_REQUIRES(mutex) {
    for (const ChildZeros* each = first; each; each = each->next_) {
      void* const got =
          ::mmap(each->data_, each->bytes_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
      // Kernels that do not know the last flag may choose another place.
      if (got != MAP_FAILED && got != each->data_) ::munmap(got, each->bytes_);
    }
  }

  void add(ChildZeros& one) {
    const MutexLock lock(mutex);
    one.next_ = first;
    if (first) first->previous_ = &one;
    first = &one;
  }

  void remove(ChildZeros& one) {
    const MutexLock lock(mutex);
    (one.previous_ ? one.previous_->next_ : first) = one.next_;
    if (one.next_) one.next_->previous_ = one.previous_;
  }
};

ChildZeros::ChildZeros(void* data, uint64_t bytes) : data_(data), bytes_(bytes) {
  Registry::get().add(*this);
}

ChildZeros::~ChildZeros() { Registry::get().remove(*this); }

}  // namespace nostall::collective
