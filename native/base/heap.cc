// Free memory given back with malloc_trim, where the C library has it.
#include "base/heap.h"

#include <malloc.h>

namespace nostall {

void give_back_free_memory([[maybe_unused]] uint64_t samples) noexcept {
#ifdef __GLIBC__
  constexpr uint64_t kMany = 100'000;
  if (samples >= kMany) ::malloc_trim(0);
#endif
}

}  // namespace nostall
