// mpi/calls.h - which calls are answered here, why others are left to the MPI, and how many of each.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace nostall::mpi {

enum class Call : uint8_t { allreduce, reduce, bcast, barrier };
inline constexpr int kCalls = 4;
const char* name_of(Call call) noexcept;

// Why a call was left to the MPI.
enum class Fallback : uint8_t {
  no,
  switched_off,
  inter_communicator,
  not_shared,
  type,
  multi_node
};
inline constexpr int kFallbacks = 6;
const char* name_of(Fallback passed) noexcept;

struct Counters {
  std::array<std::atomic<uint64_t>, kCalls> ours{};
  std::array<std::atomic<uint64_t>, kFallbacks> passed{};
  std::atomic<uint64_t> background{0};                  // nonblocking calls that were ours
  std::atomic<uint64_t> nonblocking{0}, persistent{0};  // left to the MPI
  std::atomic<uint64_t> allocations{0};                 // of MPI_Alloc_mem that were ours
};
Counters& counters();

}  // namespace nostall::mpi
