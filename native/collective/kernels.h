// collective/kernels.h - the loops behind Reducer, one table per instruction set.
#pragma once

#include <cstddef>

#include "collective/types.h"

namespace nostall::collective {

using Kernel = void (*)(void* dst, const void* left, const void* right, size_t count);
// Writes the result to two places, of which either may be an operand: one pass instead of two.
using PairKernel = void (*)(void* dst, void* also, const void* left, const void* right,
                            size_t count);

// Both null where the operation is not defined for the type.
struct Kernels {
  Kernel to_one = nullptr;
  PairKernel to_two = nullptr;
};

Kernels find_portable_kernels(Op op, DataType type) noexcept;
// As above; falls back to the portable ones on processors without AVX2.
Kernels find_kernels(Op op, DataType type) noexcept;
// Which of the two: "AVX2" or "portable".
const char* reduction_kernel() noexcept;

// memcpy by whole cache lines: lines that another core has written come from there at up to twice
// memcpy's rate, which depends on how the two addresses lie to each other (measured on Zen 4).
// memcpy itself on processors without AVX-512.
void copy_lines(void* dst, const void* src, size_t bytes) noexcept;

}  // namespace nostall::collective
