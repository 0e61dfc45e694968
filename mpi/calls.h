// mpi/calls.h - which calls are answered here, why others are left to the MPI, and how many of each.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace nostall::mpi {

// As the records of a profile number them.
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
inline constexpr size_t kCalls = 17;

// Those that may be answered here.
struct Answered {
  Call call;
  const char* name;
};
inline constexpr std::array<Answered, 8> kAnswered{
    {{Call::allreduce, "allreduce"},
     {Call::reduce, "reduce"},
     {Call::bcast, "bcast"},
     {Call::barrier, "barrier"},
     {Call::allgather, "allgather"},
     {Call::allgatherv, "allgatherv"},
     {Call::reduce_scatter, "reduce_scatter"},
     {Call::reduce_scatter_block, "reduce_scatter_block"}}};

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
  // Nonblocking calls that the profile lacks, because their communicator was not known yet.
  std::atomic<uint64_t> early{0};
};
Counters& counters();

}  // namespace nostall::mpi
