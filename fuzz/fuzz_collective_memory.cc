// A rank joins a communicator whose shared memory another rank damaged: header, lines of ranks,
// words. It is told Error, or what it reads from there stays within the memory and within what its
// type can be.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/own.h"
#include "collective/selection.h"
#include "collective/shared_memory.h"

namespace {

using namespace nostall;
using namespace nostall::collective;
using namespace std::chrono_literals;

constexpr size_t kDamaged = sizeof(Header) + 4 * kLine + 2 * sizeof(RankLine);

// The memory that rank 0 of two makes.
struct Job {
  Job() {
    char pattern[] = "/tmp/nostall-fuzz-XXXXXX";
    config.directory = ::mkdtemp(pattern);
    config.job = "fuzz";
    config.ranks = 2;
    config.window_bytes = 16 << 10;
    config.arena_bytes = 4 << 10;
    std::thread first([this] { const SharedMemory shared(config, 60s); });
    SharedMemoryConfig second = config;
    second.rank = 1;
    const SharedMemory shared(second, 60s);
    first.join();
    memory.resize(kDamaged);
    std::memcpy(memory.data(), &shared.header(), kDamaged);
    auto& header = *reinterpret_cast<Header*>(memory.data());
    header.joined = 1;
    total = static_cast<uint64_t>(shared.arena(2) - shared.at_offset(0));
  }
  ~Job() { std::filesystem::remove_all(config.directory); }

  SharedMemoryConfig config;
  std::vector<std::byte> memory;
  uint64_t total = 0;
};

volatile std::byte seen;

}  // namespace

// Patches: place (2 bytes), count, bytes; what follows a patch of no bytes is offsets that a rank
// gave, 8 bytes each.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  set_log_sink([](LogLevel, const std::string&) {});
  static Job job;
  std::vector<std::byte> bytes = job.memory;
  size_t at = 0;
  for (size_t n = 1; at + 3 <= size && n > 0;) {
    const size_t place = (data[at] | size_t{data[at + 1]} << 8) % bytes.size();
    n = std::min({size_t{data[at + 2]}, size - at - 3, bytes.size() - place});
    if (n > 0) std::memcpy(bytes.data() + place, data + at + 3, n);
    at += 3 + n;
  }
  const Descriptor file = memory_file("nostall-fuzz").take();
  if (::ftruncate(file.get(), static_cast<off_t>(job.total)) != 0) std::abort();
  FileSystem::real().pwrite(file.get(), bytes, 0);
  Handover liar("collective " + job.config.directory + " " + job.config.job, 0, 2);
  liar.give({file.get()});
  SharedMemoryConfig config = job.config;
  config.rank = 1;
  try {
    SharedMemory shared(config, 5ms);
    Phase phase(shared, 1, 2);
    for (int64_t now = 0; now < 20; now += 2) {
      static_cast<void>(phase.arrive(now));
      phase.leave(now + 1);
    }
    static_cast<void>(shared.is_dead(0));
    for (; at + 8 <= size; at += 8) {
      uint64_t offset = 0;
      std::memcpy(&offset, data + at, 8);
      const uint64_t length = 1 + offset % 5000;
      if (!shared.in_arenas(offset, length)) continue;
      seen = shared.at_offset(offset)[0];
      seen = shared.at_offset(offset)[length - 1];
      if (shared.arena_offset(shared.at_offset(offset), length) != offset) std::abort();
    }
    shared.publish_error(Error(ErrorKind::usage, "the end"), 0);
    const Error end = shared.end("");
    if (std::strlen(end.what()) > shared.header().message.size()) std::abort();
    if (end.kind() < ErrorKind::usage || end.kind() > ErrorKind::bug) std::abort();
  } catch (const Error& error) {
    if (std::strlen(error.what()) > 2000) std::abort();
  }
  return 0;
}
