// collective/types.h - element types, operations and algorithms, and their names.
//
// The numbers are part of the layout that ranks share (signature.h): append, never renumber.
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace nostall::collective {

enum class DataType : uint8_t {
  float16,
  bfloat16,
  float32,
  float64,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  boolean,  // one byte, 0 or 1
  complex64,
  complex128,
};
inline constexpr int kDataTypes = 15;

enum class Op : uint8_t {
  sum,
  prod,
  min,  // floats: a NaN on either side gives NaN
  max,
  land,  // logical: the result is 0 or 1 in the element's type
  lor,
  lxor,
  band,  // bitwise: integers and booleans
  bor,
  bxor,
};
inline constexpr int kOps = 10;

enum class Algorithm : uint8_t {
  cooperative,         // ours; the default
  arrival_leader,      // the first to arrive leads and reduces as data comes
  arrival_chain,       // each rank adds to what arrived before it and hands on
  leader,              // static leader, two steps
  recursive_doubling,  // log2(p) exchanges of the whole message
  ring,                // 2(p-1) exchanges of a p-th
  rsa,                 // Rabenseifner: recursive halving, then recursive doubling
  binomial,            // a tree up, a tree down
};
inline constexpr int kAlgorithms = 8;

enum class Order : uint8_t { any, fixed };

size_t size_of(DataType type) noexcept;
size_t alignment_of(DataType type) noexcept;
std::string_view name_of(DataType type) noexcept;  // "float32"
std::string_view name_of(Op op) noexcept;          // "sum"
std::string_view name_of(Algorithm algorithm) noexcept;
std::optional<DataType> find_data_type(std::string_view name) noexcept;
std::optional<Op> find_op(std::string_view name) noexcept;
std::optional<Algorithm> find_algorithm(std::string_view name) noexcept;

}  // namespace nostall::collective
