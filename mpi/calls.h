// mpi/calls.h - which calls are answered here, why others are left to the MPI, and how many of each.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace nostall::mpi {

// As the records of a profile number them. The first six may be answered here.
enum class Call : uint8_t {
  allreduce,
  reduce,
  bcast,
  barrier,
  allgather,
  allgatherv,
  gather,
  gatherv,
  scatter,
  scatterv,
  alltoall,
  alltoallv,
  alltoallw,
  reduce_scatter,
  reduce_scatter_block,
  scan,
  exscan
};
inline constexpr int kAnswered = 6;
const char* name_of(Call call) noexcept;  // of these six

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
  std::array<std::atomic<uint64_t>, kAnswered> ours{};
  std::array<std::atomic<uint64_t>, kFallbacks> passed{};
  std::atomic<uint64_t> background{0};                  // nonblocking calls that were ours
  std::atomic<uint64_t> nonblocking{0}, persistent{0};  // left to the MPI
  std::atomic<uint64_t> allocations{0};                 // of MPI_Alloc_mem that were ours
  // Nonblocking calls that the profile lacks, because their communicator was not known yet.
  std::atomic<uint64_t> early{0};
};
Counters& counters();

}  // namespace nostall::mpi
