// Compiled with -mavx2 where the target is x86-64; only called where the processor has it.
#include "base/processor.h"
#include "collective/kernels_body.h"

namespace nostall::collective {

Kernels find_kernels(Op op, DataType type) noexcept {
#if defined(__AVX2__)
  if (processor().avx2) return kernels_in_this_set(op, type);
#endif
  return find_portable_kernels(op, type);
}

const char* reduction_kernel() noexcept {
#if defined(__AVX2__)
  if (processor().avx2) return "AVX2";
#endif
  return "portable";
}

}  // namespace nostall::collective
