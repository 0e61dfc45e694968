// Types of fields as NumPy has them.
#pragma once

#include <nanobind/ndarray.h>

#include "fields/types.h"

namespace nostall::bindings {

inline nanobind::dlpack::dtype dtype_of(fields::Type type) {
  using nanobind::dlpack::dtype_code;
  const auto bits = static_cast<uint8_t>(8 * fields::size_of(type));
  dtype_code code = dtype_code::UInt;
  if (type == fields::Type::boolean) code = dtype_code::Bool;
  if (type >= fields::Type::int8) code = dtype_code::Int;
  if (type >= fields::Type::float16) code = dtype_code::Float;
  return {static_cast<uint8_t>(code), bits, 1};
}

}  // namespace nostall::bindings
