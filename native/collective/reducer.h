// collective/reducer.h - what an operation does to arrays: predefined ones, or the user's.
//
// Order: combine(dst, left, right) sets dst[i] = left[i] op right[i]; dst may be left or right, and
// must not overlap them otherwise. Floats are rounded to their type after each step, so a left fold
// in rank order has the same bits wherever it is computed.
// Cost: one pass; AVX2 where the processor has it.
// Thread-safety: immutable; a user's function must be callable from the thread that calls the
// collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "collective/kernels.h"
#include "collective/types.h"

namespace nostall::collective {

// As MPI_User_function: inout[i] = in[i] op inout[i], where `in` is the left operand.
using UserFunction = void (*)(const void* in, void* inout, uint64_t count, void* context);

class Reducer {
 public:
  // Throws Error(usage) for an operation that the type does not have (max of complex).
  Reducer(Op op, DataType type);
  // A user's operation on elements of `element_bytes`; `context` is handed to it.
  Reducer(UserFunction function, void* context, size_t element_bytes, bool commutative);

  size_t element_bytes() const noexcept { return element_bytes_; }
  size_t alignment() const noexcept { return alignment_; }
  bool commutative() const noexcept { return commutative_; }
  // Type and operation, as ranks compare them (signature.h).
  uint16_t elements() const noexcept { return elements_; }

  void combine(void* dst, const void* left, const void* right, uint64_t count) const;
  // dst and copy = left op right; dst may be left; `stream` writes copy past the caches.
  void combine_and_copy(void* dst, void* copy, const void* left, const void* right, uint64_t count,
                        bool stream) const;
  // Every dst = srcs[0] op srcs[1] op ..., from the left; dsts[r] may be srcs[r].
  void fold(std::span<std::byte* const> dsts, std::span<const std::byte* const> srcs,
            uint64_t count, bool stream) const;

 private:
  uint64_t block() const noexcept;

  Kernels kernels_;
  UserFunction user_ = nullptr;
  void* context_ = nullptr;
  size_t element_bytes_;
  size_t alignment_;
  bool commutative_;
  uint16_t elements_;
};

// memcpy, or past the caches for data that is not read soon.
void copy(void* dst, const void* src, uint64_t bytes, bool stream) noexcept;

// Whether `op` is defined for `type`.
bool is_defined(Op op, DataType type) noexcept;

}  // namespace nostall::collective
