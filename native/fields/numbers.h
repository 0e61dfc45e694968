// fields/numbers.h - private to the room: numbers whose bytes are not those of their type.
//
// Total over untrusted bytes; they may throw std::bad_alloc. Thread-safety: pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "fields/types.h"

namespace nostall::fields {

// Numbers as `Type` has them, one after the other, and their shape.
struct Numbers {
  std::vector<std::byte> values;
  std::array<int64_t, kMostDims> shape{};
  size_t dims = 0;
};

// Integers as varints of protocol buffers, in one dimension. Error(corruption) if the type cannot
// hold one, or the last one does not end.
Result<Numbers> parse_varints(std::span<const std::byte> bytes, Type type);

// A number of MessagePack, or lists of them nested to one shape; `wanted` are the dimensions that
// an empty list does not have. Error(corruption) if it is nothing of the kind, has more than
// kMostDims dimensions, or the type cannot hold a number exactly; floating-point types round.
Result<Numbers> parse_msgpack(std::span<const std::byte> bytes, Type type,
                              std::span<const int64_t> wanted);

// Whether the number is one of the type, and was written to `out`, size_of(type) long. Numbers of
// floating-point types are rounded.
bool store_number(Type type, int64_t number, std::byte* out);
bool store_number(Type type, uint64_t number, std::byte* out);
bool store_number(Type type, double number, std::byte* out);

}  // namespace nostall::fields
