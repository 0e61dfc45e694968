// collective/kernels.h - the loops behind Reducer, one table per instruction set.
#pragma once

#include <cstddef>

#include "collective/types.h"

namespace nostall::collective {

using Kernel = void (*)(void* dst, const void* left, const void* right, size_t count);

// nullptr where the operation is not defined for the type.
Kernel find_portable_kernel(Op op, DataType type) noexcept;
// As above; falls back to the portable ones on processors without AVX2.
Kernel find_kernel(Op op, DataType type) noexcept;

}  // namespace nostall::collective
