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
  std::span<const std::byte> values;  // exactly as many as `shape` says
  // How they lie, where they are not in C order and little-endian.
  bool fortran = false;
  bool big_endian = false;
};

// Error(corruption) if it is no such array; if it is one of objects, of structures, of numbers that
// `Type` does not have, or of more than kMostDims dimensions.
Result<Npy> parse_npy(std::span<const std::byte> bytes);

// Writes the values in C order and little-endian; `out` has room for as many bytes.
void put_in_order(const Npy& array, std::byte* out);

}  // namespace nostall::fields
