// base/cpus.h - a set of processors, of any machine that Linux runs on. With the macros of sched.h that
// are told the size (CPU_COUNT_S).
#pragma once

#include <sched.h>

#include <array>

namespace nostall {

// 8192, the kernel's most; a cpu_set_t has 1024, and the system refuses to tell those of a larger
// machine there.
using Cpus = std::array<cpu_set_t, 8>;

}  // namespace nostall
