// Static partitioning of the processor's cores, by the affinity masks of all threads of the
// process.
#include "sync/cores.h"

#include <dirent.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

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
  cpu_set_t own, all;
  CPU_ZERO(&own);
  if (::sched_getaffinity(::getpid(), sizeof all, &all) != 0) return;
  for (const int core : cores) {
    if (core < 0 || core >= CPU_SETSIZE || !CPU_ISSET(core, &all)) {
      throw Error(ErrorKind::usage,
                  "core " + std::to_string(core) + " is not one that this process may use");
    }
    CPU_SET(core, &own);
  }
  cpu_set_t rest;
  CPU_XOR(&rest, &all, &own);
  if (CPU_COUNT(&rest) == 0) {
    throw Error(ErrorKind::usage, "cores= must leave a core to the rest of the process");
  }
  const auto me = static_cast<int>(::syscall(SYS_gettid));
  for (const int id : threads()) {
    cpu_set_t before;
    if (::sched_getaffinity(id, sizeof before, &before) != 0) continue;
    std::vector<uint8_t> saved(sizeof before);
    std::memcpy(saved.data(), &before, sizeof before);
    if (::sched_setaffinity(id, sizeof rest, id == me ? &own : &rest) == 0 && id != me) {
      moved_.emplace_back(id, std::move(saved));
    }
  }
}

void CorePartition::give_back() noexcept {
  for (const auto& [id, saved] : moved_) {
    cpu_set_t before;
    std::memcpy(&before, saved.data(), sizeof before);
    ::sched_setaffinity(id, sizeof before, &before);  // a thread that ended is no matter
  }
  moved_.clear();
}

}  // namespace nostall::sync
