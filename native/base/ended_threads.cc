// Puts a function in the place of the interpreter's pthread_exit, in its table of imported functions (ELF).
#include "base/ended_threads.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string_view>

namespace nostall {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kSlots[] = {R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT};
#elif defined(__aarch64__)
constexpr uint32_t kSlots[] = {R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT};
#else
constexpr uint32_t kSlots[] = {~uint32_t{0}};
#endif

using Exit = void (*)(void*);

constexpr unsigned kMostSeconds = 60;

std::atomic<pthread_t> ending;
int (*is_shutting_down)() = nullptr;
Exit real_exit = nullptr;

void exit_thread(void* result) {
  if (is_shutting_down() != 0 && pthread_equal(pthread_self(), ending) == 0) {
    // Not for ever: who joins this thread would wait as long.
    for (unsigned left = kMostSeconds; left > 0;) left = ::sleep(left);
  }
  real_exit(result);
}

void set(uintptr_t slot, Exit function) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  // The linker may have made it read-only.
  if (::mprotect(reinterpret_cast<void*>(slot / page * page), page, PROT_READ | PROT_WRITE) != 0) {
    return;
  }
  std::atomic_ref(*reinterpret_cast<Exit*>(slot)).store(function);
}

// Where the dynamic linker has put the addresses of what an executable or a library calls.
class Imports {
 public:
  explicit Imports(const link_map& object) : base_(object.l_addr) {
    for (const ElfW(Dyn)* entry = object.l_ld; entry->d_tag != DT_NULL; ++entry) {
      switch (entry->d_tag) {
        case DT_SYMTAB:
          symbols_ = at<ElfW(Sym)>(entry->d_un.d_ptr);
          break;
        case DT_STRTAB:
          names_ = at<char>(entry->d_un.d_ptr);
          break;
        case DT_JMPREL:
          tables_[0].first = at<ElfW(Rela)>(entry->d_un.d_ptr);
          break;
        case DT_PLTRELSZ:
          tables_[0].bytes = entry->d_un.d_val;
          break;
        case DT_RELA:
          tables_[1].first = at<ElfW(Rela)>(entry->d_un.d_ptr);
          break;
        case DT_RELASZ:
          tables_[1].bytes = entry->d_un.d_val;
          break;
        default:
          break;
      }
    }
  }

  void replace(std::string_view name, Exit function) const {
    if (symbols_ == nullptr || names_ == nullptr) return;
    for (const Table& table : tables_) {
      if (table.first == nullptr) continue;
      for (size_t i = 0; i < table.bytes / sizeof(ElfW(Rela)); ++i) {
        const ElfW(Rela)& one = table.first[i];
        for (const uint32_t kind : kSlots) {
          if (ELF64_R_TYPE(one.r_info) != kind) continue;
          const ElfW(Sym)& symbol = symbols_[ELF64_R_SYM(one.r_info)];
          if (names_ + symbol.st_name == name) set(base_ + one.r_offset, function);
        }
      }
    }
  }

 private:
  struct Table {
    const ElfW(Rela) * first = nullptr;
    size_t bytes = 0;
  };

  // Some linkers add the base where they load, others leave that to the reader.
  template <typename T>
  const T* at(uintptr_t address) const {
    return reinterpret_cast<const T*>(address < base_ ? base_ + address : address);
  }

  const uintptr_t base_;
  const ElfW(Sym) * symbols_ = nullptr;
  const char* names_ = nullptr;
  Table tables_[2];
};

}  // namespace

void keep_ended_threads(const void* interpreter, int (*shuts_down)()) {
  ending = pthread_self();
  if (is_shutting_down != nullptr) return;
  Dl_info info;
  link_map* object = nullptr;
  real_exit = reinterpret_cast<Exit>(::dlsym(RTLD_DEFAULT, "pthread_exit"));
  if (real_exit == nullptr ||
      ::dladdr1(interpreter, &info, reinterpret_cast<void**>(&object), RTLD_DL_LINKMAP) == 0) {
    return;
  }
  is_shutting_down = shuts_down;
  Imports(*object).replace("pthread_exit", exit_thread);
}

}  // namespace nostall
