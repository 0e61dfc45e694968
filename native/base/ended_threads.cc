// Puts a function in the place of the interpreter's pthread_exit, in its table of imported functions (ELF).
#include "base/ended_threads.h"

#include <cstdint>  // defines __GLIBC__, where that is the library

#if defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__))

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <string_view>

namespace nostall {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kSlots[] = {R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT};
#else
constexpr uint32_t kSlots[] = {R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT};
#endif

using Exit = void (*)(void*);

constexpr unsigned kMostSeconds = 10;

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

bool set(uintptr_t slot, Exit function) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  // The linker may have made it read-only.
  if (::mprotect(reinterpret_cast<void*>(slot / page * page), page, PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
  std::atomic_ref(*reinterpret_cast<Exit*>(slot)).store(function);
  return true;
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

  // Whether there is such an import, and all of them could be written.
  bool replace(std::string_view name, Exit function) const {
    if (symbols_ == nullptr || names_ == nullptr) return false;
    bool replaced = false;
    for (const Table& table : tables_) {
      if (table.first == nullptr) continue;
      for (size_t i = 0; i < table.bytes / sizeof(ElfW(Rela)); ++i) {
        const ElfW(Rela)& one = table.first[i];
        for (const uint32_t kind : kSlots) {
          if (ELF64_R_TYPE(one.r_info) != kind) continue;
          const ElfW(Sym)& symbol = symbols_[ELF64_R_SYM(one.r_info)];
          if (names_ + symbol.st_name != name) continue;
          if (!set(base_ + one.r_offset, function)) return false;
          replaced = true;
        }
      }
    }
    return replaced;
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

bool keep_ended_threads(const void* interpreter, int (*shuts_down)()) {
  ending = pthread_self();
  static const bool replaced = [&] {
    Dl_info info;
    link_map* object = nullptr;
    real_exit = reinterpret_cast<Exit>(::dlsym(RTLD_DEFAULT, "pthread_exit"));
    if (real_exit == nullptr ||
        ::dladdr1(interpreter, &info, reinterpret_cast<void**>(&object), RTLD_DL_LINKMAP) == 0) {
      return false;
    }
    is_shutting_down = shuts_down;
    return Imports(*object).replace("pthread_exit", exit_thread);
  }();
  return replaced;
}

}  // namespace nostall

#else

namespace nostall {

bool keep_ended_threads(const void*, int (*)()) { return false; }

}  // namespace nostall

#endif
