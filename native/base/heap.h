// base/heap.h - what the allocator keeps after work that needed much memory for a moment.
#pragma once

#include <cstdint>

namespace nostall {

// Gives free memory of this process back to the system, where the allocator can. Lists and orders
// of many samples leave more of it behind than they keep; with fewer than 100,000 nothing is done.
// Costs milliseconds, and page faults afterwards: for the beginning of a job.
void give_back_free_memory(uint64_t samples) noexcept;

}  // namespace nostall
