// How long each thread of Python has the GIL: the processor time of the thread, less that between the
// calls by which extension modules give the GIL up and take it back. What the interpreter itself does
// without it (a little around a sleep) counts as with it.
//
// To watch these calls, other addresses are written into the tables of imported functions of every
// library that is loaded.
//
// And how long each thread is in functions of the device, which stand where a driver's would.
#include "gil.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

namespace {

struct Thread {
  pthread_t id;
  std::atomic<int64_t> without{0};  // nanoseconds of processor time
  std::atomic<int64_t> since{-1};   // the GIL was given up, or -1
  // In functions of the device: nanoseconds, and those of processor time with the GIL.
  std::atomic<int64_t> inside{0}, inside_with_gil{0};
};

std::atomic<bool> watching{false};
thread_local int depth = 0;  // of functions of the device

std::mutex mutex;
std::vector<Thread*>& threads() {
  static auto* const all = new std::vector<Thread*>;  // threads may end after statics
  return *all;
}

int64_t used(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

Thread& mine() {
  thread_local Thread* const made = [] {
    auto* thread = new Thread{::pthread_self()};
    const std::lock_guard lock(mutex);
    // One that has ended may have had the same number.
    std::erase_if(threads(), [=](Thread* other) { return other->id == thread->id; });
    threads().push_back(thread);
    return thread;
  }();
  return *made;
}

Thread* find(pthread_t id) {
  const std::lock_guard lock(mutex);
  const auto found = std::find_if(threads().begin(), threads().end(),
                                  [&](const Thread* thread) { return thread->id == id; });
  return found == threads().end() ? nullptr : *found;
}

void given_up() { mine().since = used(CLOCK_THREAD_CPUTIME_ID); }
void taken_back() {
  Thread& thread = mine();
  if (thread.since < 0) return;
  thread.without += used(CLOCK_THREAD_CPUTIME_ID) - thread.since;
  thread.since = -1;
}

// The functions of the interpreter, found when the watch begins.
void* (*save_thread)();
void (*restore_thread)(void*);
void (*acquire_thread)(void*);
void (*release_thread)(void*);
int (*ensure)();
void (*release)(int);

void* watched_save_thread() {
  given_up();
  return save_thread();
}
void watched_restore_thread(void* state) {
  restore_thread(state);
  taken_back();
}
void watched_acquire_thread(void* state) {
  acquire_thread(state);
  taken_back();
}
void watched_release_thread(void* state) {
  given_up();
  release_thread(state);
}
int watched_ensure() {
  const int state = ensure();
  taken_back();
  return state;
}
void watched_release(int state) {
  if (state != 0) given_up();  // the thread did not have it before
  release(state);
}

struct Function {
  const char* name;
  void** original;
  void* watched;
};
#define WATCHED(name, function) \
  { name, reinterpret_cast<void**>(&function), reinterpret_cast<void*>(watched_##function) }
const Function kFunctions[] = {
    WATCHED("PyEval_SaveThread", save_thread),
    WATCHED("PyEval_RestoreThread", restore_thread),
    WATCHED("PyEval_AcquireThread", acquire_thread),
    WATCHED("PyEval_ReleaseThread", release_thread),
    WATCHED("PyGILState_Ensure", ensure),
    WATCHED("PyGILState_Release", release),
};

void write(void** place, void* address) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(place) / page * page;
  ::mprotect(reinterpret_cast<void*>(begin), page, PROT_READ | PROT_WRITE);
  *place = address;
}

int watch_library(dl_phdr_info* library, size_t, void*) {
  const ElfW(Dyn)* entry = nullptr;
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    if (library->dlpi_phdr[i].p_type == PT_DYNAMIC) {
      entry =
          reinterpret_cast<const ElfW(Dyn)*>(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr);
    }
  }
  if (!entry || std::strstr(library->dlpi_name, "linux-vdso")) return 0;
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela) * tables[2] = {nullptr, nullptr};  // of data and of functions
  size_t bytes[2] = {0, 0};
  for (; entry->d_tag != DT_NULL; ++entry) {
    switch (entry->d_tag) {
      case DT_SYMTAB:
        symbols = reinterpret_cast<const ElfW(Sym)*>(entry->d_un.d_ptr);
        break;
      case DT_STRTAB:
        names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
        break;
      case DT_RELA:
        tables[0] = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr);
        break;
      case DT_RELASZ:
        bytes[0] = entry->d_un.d_val;
        break;
      case DT_JMPREL:
        tables[1] = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr);
        break;
      case DT_PLTRELSZ:
        bytes[1] = entry->d_un.d_val;
        break;
      default:
        break;
    }
  }
  if (!symbols || !names) return 0;
  for (int table = 0; table < 2; ++table) {
    for (size_t i = 0; tables[table] && i < bytes[table] / sizeof(ElfW(Rela)); ++i) {
      const ElfW(Rela)& relocation = tables[table][i];
      const size_t symbol = ELF64_R_SYM(relocation.r_info);
      if (symbol == 0 || relocation.r_addend != 0) continue;
      const char* name = names + symbols[symbol].st_name;
      for (const Function& function : kFunctions) {
        if (std::strcmp(name, function.name) == 0) {
          write(reinterpret_cast<void**>(library->dlpi_addr + relocation.r_offset),
                function.watched);
        }
      }
    }
  }
  return 0;
}

}  // namespace

namespace simdev {

Inside::Inside() {
  if (depth++ > 0 || !watching) return;
  const Thread& thread = mine();
  if (thread.since < 0) processor_ = used(CLOCK_THREAD_CPUTIME_ID);
  began_ = used(CLOCK_MONOTONIC);
}

Inside::~Inside() {
  --depth;
  if (began_ < 0) return;
  Thread& thread = mine();
  thread.inside += used(CLOCK_MONOTONIC) - began_;
  if (processor_ >= 0) thread.inside_with_gil += used(CLOCK_THREAD_CPUTIME_ID) - processor_;
}

}  // namespace simdev

extern "C" {

// Libraries that are loaded later are not watched.
void simdev_watch_gil() {
  for (const Function& function : kFunctions) {
    *function.original = ::dlsym(RTLD_DEFAULT, function.name);
  }
  ::dl_iterate_phdr(watch_library, nullptr);
  watching = true;
}

// Nanoseconds of processor time for which a living thread has had the GIL, which the caller has now.
int64_t simdev_with_gil(pthread_t id) {
  clockid_t clock;
  if (::pthread_getcpuclockid(id, &clock) != 0) return 0;
  const Thread* found = find(id);
  if (!found) return used(clock);
  const int64_t since = found->since;
  return (since < 0 ? used(clock) : since) - found->without;
}

// Nanoseconds that a thread was in functions of the device; if `gil`, of processor time with the GIL.
int64_t simdev_inside(pthread_t id, int gil) {
  const Thread* found = find(id);
  if (!found) return 0;
  return gil != 0 ? found->inside_with_gil : found->inside;
}
}
