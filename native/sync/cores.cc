// Static partitioning of the processor's cores, by the affinity masks of all threads of the
// process.
#include "sync/cores.h"

#include <dirent.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

#include "base/error.h"

namespace nostall::sync {
namespace {

// The process's threads that there are now; later ones inherit from those that start them.
std::vector<int> threads() {
  std::vector<int> ids;
  DIR* directory = ::opendir("/proc/self/task");
  if (!directory) return ids;
  while (const dirent* entry = ::readdir(directory)) {
    const int id = std::atoi(entry->d_name);
    if (id > 0) ids.push_back(id);
  }
  ::closedir(directory);
  return ids;
}

}  // namespace

void CorePartition::take(std::span<const int> cores) {
  if (cores.empty()) return;
  constexpr size_t kBytes = sizeof(Cpus);
  Cpus own{}, all{};
  if (::sched_getaffinity(::getpid(), kBytes, all.data()) != 0) return;
  for (const int core : cores) {
    const auto place = static_cast<size_t>(core);
    if (core < 0 || !CPU_ISSET_S(place, kBytes, all.data())) {
      throw Error(ErrorKind::usage,
                  "core " + std::to_string(core) + " is not one that this process may use");
    }
    CPU_SET_S(place, kBytes, own.data());
  }
  Cpus rest{};
  CPU_XOR_S(kBytes, rest.data(), all.data(), own.data());
  if (CPU_COUNT_S(kBytes, rest.data()) == 0) {
    throw Error(ErrorKind::usage, "cores= must leave a core to the rest of the process");
  }
  const auto me = static_cast<int>(::syscall(SYS_gettid));
  for (const int id : threads()) {
    Cpus before{};
    if (::sched_getaffinity(id, kBytes, before.data()) != 0) continue;
    if (::sched_setaffinity(id, kBytes, id == me ? own.data() : rest.data()) == 0 && id != me) {
      moved_.emplace_back(id, before);
    }
  }
}

void CorePartition::give_back() noexcept {
  for (const auto& [id, before] : moved_) {
    ::sched_setaffinity(id, sizeof before, before.data());  // a thread that ended is no matter
  }
  moved_.clear();
}

}  // namespace nostall::sync
