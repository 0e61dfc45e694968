// sync/convert.h - copies of floating-point arrays between types, scaled on the way.
//
// Computed in float (double for float64); 16-bit types are rounded to nearest even.
#pragma once

#include <cstdint>

#include "collective/types.h"

namespace nostall::sync {

bool is_floating(collective::DataType type) noexcept;
// to[i] = from[i] * scale. Both types are floating point.
void scale_into(void* to, collective::DataType to_type, const void* from,
                collective::DataType from_type, uint64_t count, double scale);
// One element, read and written.
double number_at(const void* data, collective::DataType type, uint64_t at);
void set_number(void* data, collective::DataType type, uint64_t at, double value);
// The first element that is not finite; `count` if all are.
uint64_t first_not_finite(const void* data, collective::DataType type, uint64_t count);

}  // namespace nostall::sync
