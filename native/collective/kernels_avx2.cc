// Compiled with -mavx2 where the target is x86-64; only called where the processor has it.
#include "collective/kernels_body.h"

namespace nostall::collective {

Kernels find_kernels(Op op, DataType type) noexcept {
#if defined(__AVX2__)
  static const bool wide = __builtin_cpu_supports("avx2");
  if (wide) return kernels_in_this_set(op, type);
#endif
  return find_portable_kernels(op, type);
}

}  // namespace nostall::collective
