// Reads the limits of memory: /proc/meminfo, the control groups of this process (v1 and v2), the
// free space of the shared-memory file system, and RLIMIT_AS. Missing files mean that there is no
// such limit.
#include "base/limits.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

namespace nostall {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostReserve = uint64_t{1} << 30;
constexpr uint64_t kUnlimited = uint64_t{1} << 60;  // v1 writes "no limit" as a number near 2^63

std::optional<uint64_t> number(const std::string& text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end == text.data()) return std::nullopt;
  return value;
}

// The first word of a file that is a number; nothing for "max" and where there is no such file.
std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  return number(word);
}

// The number after `key` in a file of lines "key number".
std::optional<uint64_t> number_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string first, second;
    if (words >> first >> second && first == key) return number(second);
  }
  return std::nullopt;
}

bool has_word(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// As in /proc/self/mountinfo: a space is \040.
std::string unescaped(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 +
                               (text[i + 3] - '0'));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

// Where the hierarchy with the memory controller is mounted, and which of its groups is mounted.
struct Mount {
  std::string root, point;
  bool unified = false;
};

std::vector<Mount> mounts(const std::string& proc) {
  std::vector<Mount> found;
  std::ifstream file(proc + "/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string skipped, root, point, word, type, source, options;
    words >> skipped >> skipped >> skipped >> root >> point;
    while (words >> word && word != "-") {
    }
    words >> type >> source >> options;
    if (type != "cgroup2" && !(type == "cgroup" && has_word(options, "memory"))) continue;
    found.push_back({unescaped(root), unescaped(point), type == "cgroup2"});
  }
  return found;
}

// This process's group in the hierarchy, as a path from its root.
std::string group_of(const std::string& proc, bool unified) {
  std::ifstream file(proc + "/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t one = line.find(':'), two = line.find(':', one + 1);
    if (one == std::string::npos || two == std::string::npos) continue;
    const std::string controllers = line.substr(one + 1, two - one - 1);
    if (unified ? line.starts_with("0:") && controllers.empty() : has_word(controllers, "memory")) {
      return line.substr(two + 1);
    }
  }
  return "/";
}

}  // namespace

uint64_t MemoryLimit::reserve() const noexcept { return std::min(limit / 8, kMostReserve); }

uint64_t MemoryLimit::left() const noexcept {
  const uint64_t taken = used + reserve();
  return limit > taken ? limit - taken : 0;
}

uint64_t MemoryLimit::rest() const noexcept {
  const uint64_t taken = used - std::min(used, cached);
  return limit > taken ? limit - taken : 0;
}

uint64_t MemoryLimit::over() const noexcept {
  const uint64_t needed = used - std::min(used, cached) + reserve();
  return needed > limit ? needed - limit : 0;
}

std::string MemoryLimit::in_words() const {
  return std::to_string(used) + " of " + std::to_string(limit) + " bytes of " + what +
         " are in use, " + std::to_string(reserve()) + " are kept free";
}

MemoryLimits::MemoryLimits(std::string shm_directory, std::string proc)
    : shm_(std::move(shm_directory)), proc_(std::move(proc)) {
  for (const Mount& mount : mounts(proc_)) {
    std::string group = group_of(proc_, mount.unified);
    // In a container the mount may show a part of the hierarchy only.
    if (mount.root != "/") {
      group = (group + "/").starts_with(mount.root + "/") ? group.substr(mount.root.size()) : "/";
    }
    if (group.starts_with("/..")) group = "/";
    const fs::path top(mount.point);
    for (fs::path at = (top / fs::path(group).relative_path()).lexically_normal();;
         at = at.parent_path()) {
      if (at.filename().empty()) at = at.parent_path();
      groups_.push_back({at.string(), mount.unified});
      if (at == top || at == at.parent_path()) break;
    }
  }
}

std::vector<MemoryLimit> MemoryLimits::read() const {
  std::vector<MemoryLimit> limits;
  const std::string meminfo = proc_ + "/meminfo";
  const auto total = number_of(meminfo, "MemTotal:");
  const auto available = number_of(meminfo, "MemAvailable:");
  if (total && available) {
    limits.push_back({LimitKind::machine, "the machine's memory (MemAvailable)", *total * 1024,
                      (*total - std::min(*total, *available)) * 1024});
  }

  for (const Group& group : groups_) {
    const std::string& at = group.directory;
    const auto used =
        number_in(at + (group.unified ? "/memory.current" : "/memory.usage_in_bytes"));
    if (!used) continue;
    // Pages of files that were read once are given back when memory is short.
    const auto idle =
        number_of(at + "/memory.stat", group.unified ? "inactive_file" : "total_inactive_file");
    using Names = std::vector<std::string>;
    uint64_t cached = 0;
    for (const std::string& name :
         group.unified ? Names{"active_file", "slab_reclaimable"} : Names{"total_active_file"}) {
      cached += number_of(at + "/memory.stat", name).value_or(0);
    }
    for (const std::string& name :
         group.unified ? Names{"memory.max", "memory.high"} : Names{"memory.limit_in_bytes"}) {
      const auto limit = number_in(at + "/" + name);
      if (!limit || *limit >= kUnlimited) continue;
      limits.push_back({LimitKind::cgroup, "the control group's memory (" + at + "/" + name + ")",
                        *limit, *used - std::min(*used, idle.value_or(0)), cached});
    }
  }

  std::ifstream own(proc_ + "/self/limits");
  const std::string address_space = "Max address space";
  for (std::string line; std::getline(own, line);) {
    if (!line.starts_with(address_space)) continue;
    std::istringstream words(line.substr(address_space.size()));
    std::string soft;
    words >> soft;
    const auto limit = number(soft);
    const auto pages = number_in(proc_ + "/self/statm");
    if (limit && pages) {
      limits.push_back({LimitKind::address_space, "the address space (ulimit -v)", *limit,
                        *pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE))});
    }
  }

  struct statvfs status {};
  if (::statvfs(shm_.c_str(), &status) != 0) {
    limits.push_back({LimitKind::shared_memory, "the shared memory (no " + shm_ + ")", 0, 0});
  } else if (status.f_blocks > 0) {
    const uint64_t block = status.f_frsize;
    limits.push_back({LimitKind::shared_memory, "the shared memory (" + shm_ + ")",
                      status.f_blocks * block, (status.f_blocks - status.f_bavail) * block});
  }
  return limits;
}

const MemoryLimit* least(std::span<const MemoryLimit> limits) noexcept {
  const auto found = std::min_element(
      limits.begin(), limits.end(),
      [](const MemoryLimit& a, const MemoryLimit& b) { return a.left() < b.left(); });
  return found == limits.end() ? nullptr : &*found;
}

std::optional<std::string> refusal(std::span<const MemoryLimit> limits, uint64_t bytes) {
  const MemoryLimit* limit = least(limits);
  if (limit == nullptr || limit->left() >= bytes) return std::nullopt;
  return limit->in_words();
}

}  // namespace nostall
