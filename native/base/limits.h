// base/limits.h - how much more memory this process may take, by every limit that binds it.
//
// Four kinds of limit end a program that passes them, each in its own way: the machine's memory and
// the limits of its control groups (v1 and v2, each level up to the root) by the out-of-memory
// killer, the size of the shared-memory file system by SIGBUS, the address space by std::bad_alloc.
// A reserve of each is left to others. All numbers are read here and nowhere else; what follows
// from them is pure.
// Thread-safety: a MemoryLimits may be read from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace nostall {

enum class LimitKind : uint8_t { machine, cgroup, address_space, shared_memory };

struct MemoryLimit {
  LimitKind kind = LimitKind::machine;
  std::string what;     // in words, with the path of what was read
  uint64_t limit = 0;   // bytes
  uint64_t used = 0;    // bytes of it that cannot be had
  uint64_t cached = 0;  // of those, what the system frees before it refuses or kills

  // An eighth, at most 1 GiB: what is never taken.
  uint64_t reserve() const noexcept;
  // Bytes that may be taken now, and where nothing is in use.
  uint64_t left() const noexcept;
  uint64_t most() const noexcept { return limit - reserve(); }
  // Bytes until the system refuses or kills.
  uint64_t rest() const noexcept;
  // Bytes in use of what is never taken, and beyond the limit (memory.high may be passed).
  uint64_t over() const noexcept;
  // How much of what is in use.
  std::string in_words() const;
};

class MemoryLimits {
 public:
  explicit MemoryLimits(std::string shm_directory = "/dev/shm", std::string proc = "/proc");

  // The limits as they stand now; one without a bound is left out. A shared-memory directory that
  // is not there has no room.
  std::vector<MemoryLimit> read() const;

 private:
  struct Group {
    std::string directory;
    bool unified = false;  // cgroup v2
  };
  std::vector<Group> groups_;
  std::string shm_, proc_;
};

// Why so many bytes more cannot be had, by the limit that leaves the least; nothing if
// all have room.
std::optional<std::string> refusal(std::span<const MemoryLimit> limits, uint64_t bytes);
// The limit that leaves the least; null if there is none.
const MemoryLimit* least(std::span<const MemoryLimit> limits) noexcept;

}  // namespace nostall
