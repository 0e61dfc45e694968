// collective/signature.h - what a rank calls, in 64 bits that ranks compare at each step.
//
//   operation 4 | root 10 | type and operation 16 | count modulo 2^34
//   allgatherv 4 | a hash of the sizes of all ranks 60
#pragma once

#include <cstdint>
#include <string>

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

inline constexpr uint64_t kCountBits = 34;

constexpr uint64_t signature_of(Call call, uint32_t root, uint16_t code, uint64_t count) noexcept {
  return uint64_t{static_cast<uint8_t>(call)} << 60 | uint64_t{root & 0x3ffu} << 50 |
         uint64_t{code} << 34 | (count & ((uint64_t{1} << kCountBits) - 1));
}
constexpr uint64_t signature_of_sizes(uint64_t hash) noexcept {
  return uint64_t{static_cast<uint8_t>(Call::allgatherv)} << 60 | hash >> 4;
}
const char* name_of(Call call) noexcept;
// "reduce of 4 float32 elements, sum, to rank 0"
std::string describe_signature(uint64_t signature);

}  // namespace nostall::collective
