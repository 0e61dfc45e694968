// fields/text.h - what makes bytes text: UTF-8, JSON, and numbers in decimal.
//
// Total over untrusted bytes. Thread-safety: pure.
#pragma once

#include <cstddef>
#include <span>

#include "base/error.h"
#include "fields/types.h"

namespace nostall::fields {

// Where the first byte lies that is not UTF-8; the length if all are.
size_t valid_utf8(std::span<const std::byte> bytes) noexcept;

// Error(corruption) with the place if `bytes` are not one JSON value [RFC 8259] nested at most
// kMostNesting deep, with numbers of at most kMostDigits characters: what Python's json reads.
inline constexpr size_t kMostNesting = 512, kMostDigits = 4000;
Result<std::monostate> check_json(std::span<const std::byte> bytes);

// A number in decimal, with blanks around it ("7\n", as in the .cls members of tar shards), written
// to `out`, size_of(type) long.
Result<std::monostate> parse_number(std::span<const std::byte> bytes, Type type, std::byte* out);

}  // namespace nostall::fields
