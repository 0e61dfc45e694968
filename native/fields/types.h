// fields/types.h - the types of values, and what a batch holds of one field.
//
// Thread-safety: values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace nostall::fields {

// NumPy's names; values lie in little-endian order.
enum class Type : uint8_t {
  boolean,
  uint8,
  uint16,
  uint32,
  uint64,
  int8,
  int16,
  int32,
  int64,
  float16,
  float32,
  float64,
};

size_t size_of(Type type) noexcept;              // bytes
std::string_view name_of(Type type) noexcept;    // "float32"
Result<Type> type_named(std::string_view name);  // Error(usage) names those that there are

inline constexpr int64_t kRagged = -1;  // a dimension that differs from sample to sample
inline constexpr size_t kMostDims = 8;

// How the values of one field lie in a batch of n samples.
enum class Form : uint8_t {
  dense,   // (n, shape...)
  ragged,  // one after the other, and n + 1 offsets
  padded,  // (n, longest...), zero behind the values, and the lengths
};

struct Output {
  std::string name;
  Type type = Type::uint8;
  std::vector<int64_t> shape;  // of one sample; kRagged stands only in outputs that are not dense
  Form form = Form::dense;
  size_t bytes() const noexcept;  // of one sample; dense outputs only
  // Whether the first dimension alone is ragged: then offsets and lengths count rows.
  bool by_rows() const noexcept;
};

}  // namespace nostall::fields
