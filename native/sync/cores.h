// sync/cores.h - cores of the processor for one thread alone: the calling thread on them, all other
// threads of the process off them (Horovod-SCP [Pumma 2020, sec. 6.3.3]).
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "base/cpus.h"

namespace nostall::sync {

class CorePartition {
 public:
  // Threads that start later inherit from those that start them. Throws Error(usage) for a core
  // that this process may not use, and if none is left to the other threads.
  void take(std::span<const int> cores);
  // The other threads may use the cores again.
  void give_back() noexcept;

 private:
  std::vector<std::pair<int, Cpus>> moved_;  // threads and their cores before
};

}  // namespace nostall::sync
