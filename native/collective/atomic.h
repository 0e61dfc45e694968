// collective/atomic.h - the atomics that ranks share.
//
// With NOSTALL_COLLECTIVE_MODEL, for tests only, every operation on them is a point at which a
// scheduler chooses which rank goes on, or at which a delay is put in; futexes are then the
// scheduler's (tests/native/collective_model/scheduler.h).
#pragma once

#ifdef NOSTALL_COLLECTIVE_MODEL
#include "scheduler.h"
#else
#include <atomic>
#endif

namespace nostall::collective {

#ifdef NOSTALL_COLLECTIVE_MODEL
template <typename T>
using Atomic = model::Atomic<T>;
// Whether a scheduler runs this thread: then waits are futexes at once, and no clock counts.
inline bool is_scheduled() noexcept { return model::is_scheduled(); }
#else
template <typename T>
using Atomic = std::atomic<T>;
constexpr bool is_scheduled() noexcept { return false; }
#endif

}  // namespace nostall::collective
