// checkpoint/write.h - a snapshot into a file, past the page cache, while the training goes on.
//
// Blocks are written in order of their copying, each with its CRC32C; the file is complete on its
// device when run returns (fsync of the file; the directory is the caller's). Direct input and
// output where the file system can, else buffered with early write-back, so that no heap of dirty
// pages builds up that the training would wait behind. Thread-safety: run once, by one thread;
// hurry and stop by any other while it runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "checkpoint/output.h"
#include "checkpoint/pace.h"
#include "checkpoint/snapshot.h"

namespace nostall::checkpoint {

struct WriteOptions {
  uint64_t rate = 0;  // bytes a second, 0: as fast as it goes
  Priority priority = Priority::low;
  unsigned threads = 1;  // writes in flight
  bool direct = true;    // try to write past the page cache
  // How long a closed gate may delay one block, and whether the training's loaders and gradient
  // engines close it.
  double gate_patience = 1.0;
  bool considerate = false;
};

// What a finished file is.
struct Written {
  uint64_t size = 0;
  std::vector<uint32_t> crcs;  // of each block
  bool direct = false;
  double seconds = 0;      // from the start of run to the end of fsync
  double cpu_seconds = 0;  // of the writing threads
};

class Write {
 public:
  // The file is made or replaced.
  Write(std::shared_ptr<Snapshot> snapshot, std::string path, WriteOptions options,
        std::shared_ptr<Gate> gate = nullptr, FileSystem& files = FileSystem::real());
  // Throws Error(io) with the path and the system's reason, Error(stopped) after stop.
  Written run();
  // A caller waits: the rate falls, the gate is passed over, and the thread of run writes blocks too,
  // at its own priority. Returns at once: storage that hangs holds up run alone.
  void hurry();
  // run ends with Error(stopped), after the blocks in flight.
  void stop() noexcept {
    stopped_ = true;
    pace_.lift();
  }

 private:
  // Writes the next block; false if there is none, or no more is to be written.
  bool write_next();

  std::shared_ptr<Snapshot> snapshot_;
  std::string path_;
  WriteOptions options_;
  std::shared_ptr<Gate> gate_;
  FileSystem& files_;
  Pace pace_;
  std::optional<Output> output_;
  std::vector<uint32_t> crcs_;
  std::atomic<uint64_t> next_{0};
  std::atomic<int64_t> error_{0};  // -errno of the first failure
  std::atomic<bool> stopped_{false};
  std::atomic<bool> lost_{false};
  std::atomic<bool> hurried_{false};
  std::atomic<int64_t> cpu_ns_{0};
  Lowered lowered_;
};

}  // namespace nostall::checkpoint
