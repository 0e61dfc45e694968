// fields/npy.h - arrays in NumPy's .npy format, versions 1 to 3.
//
// Total over untrusted bytes; no memory is taken. Thread-safety: pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "fields/types.h"

namespace nostall::fields {

struct Npy {
  Type type = Type::uint8;
  size_t dims = 0;
  std::array<int64_t, kMostDims> shape{};
  std::span<const std::byte> values;  // in C order, little-endian, exactly as many as `shape` says
};

// Error(corruption) if it is no such array; if it is one of objects, of structures, of numbers that
// `Type` does not have, in big-endian or Fortran order, or of more than kMostDims dimensions.
Result<Npy> parse_npy(std::span<const std::byte> bytes);

}  // namespace nostall::fields
