// collective/signature.h - what a rank calls, in 64 bits that ranks compare at each step.
//
//   operation 4 | root 10 | order 1 | algorithm 3 | elements 14 | count 32
//   allgatherv 4 | elements 14 | a hash of the sizes of all ranks 46
//   count: below 2^31 itself, from there on 1 and a hash of it in 31; of reduce_scatterv a hash
//   elements: 0 where no type is given | type + 1 in 9, operation 5 | 1, bytes of a user's element 13
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "collective/types.h"

namespace nostall::collective {

enum class Call : uint8_t {
  barrier = 1,
  allreduce,
  reduce,
  broadcast,
  reduce_scatter,
  allgather,
  allgatherv,
  reduce_scatterv,  // in place of a count: a hash of the counts of all ranks
};

struct Signature {
  Call call = Call::barrier;
  uint32_t root = 0;
  Order order = Order::any;
  Algorithm algorithm = Algorithm::cooperative;
  uint16_t elements = 0;
  uint64_t count = 0;  // of allgatherv and reduce_scatterv: a hash of those of all ranks
};

constexpr uint16_t elements_of(DataType type, Op op) noexcept {
  return static_cast<uint16_t>((static_cast<uint16_t>(type) + 1) << 5 | static_cast<uint16_t>(op));
}
// Of a call that moves them.
constexpr uint16_t elements_of(std::optional<DataType> type) noexcept {
  return type ? elements_of(*type, Op{}) : uint16_t{0};
}
// Of an operation of the user.
constexpr uint16_t elements_of(size_t bytes) noexcept {
  return static_cast<uint16_t>(0x2000u | std::min<size_t>(bytes, 0x1fffu));
}

// From here on a count is packed as its hash.
inline constexpr uint32_t kHashedCount = 1u << 31;

constexpr uint32_t pack_count(uint64_t count) noexcept {
  if (count < kHashedCount) return static_cast<uint32_t>(count);
  // Fibonacci hashing: counts that differ by less than 2^30 have different ones.
  return kHashedCount | static_cast<uint32_t>(count * 0x9e3779b97f4a7c15u >> 33);
}

constexpr uint64_t pack(const Signature& what) noexcept {
  const uint64_t call = uint64_t{static_cast<uint8_t>(what.call)} << 60;
  if (what.call == Call::allgatherv) return call | uint64_t{what.elements} << 46 | what.count >> 18;
  return call | uint64_t{what.root & 0x3ffu} << 50 | uint64_t{what.order == Order::fixed} << 49 |
         uint64_t{static_cast<uint8_t>(what.algorithm)} << 46 | uint64_t{what.elements} << 32 |
         (what.call == Call::reduce_scatterv ? what.count & 0xffffffffu : pack_count(what.count));
}
const char* name_of(Call call) noexcept;
// "reduce of 4 float32 elements, sum, to rank 0"
std::string describe_signature(uint64_t packed);

}  // namespace nostall::collective
