// checkpoint/transfer.h - checkpoints' files from one storage to another, and back into memory.
//
// Both check every block against its CRC32C, so that damage on the fast storage is not copied to
// the durable one, and none gets into the training. Thread-safety: each call stands alone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "checkpoint/pace.h"
#include "checkpoint/snapshot.h"
#include "checkpoint/write.h"

namespace nostall::checkpoint {

class Input;

// Copies a file of `crcs.size()` blocks, checking what it reads; complete on the device at the end.
class FileCopy {
 public:
  FileCopy(std::string from, std::string to, uint64_t size, std::vector<uint32_t> crcs,
           WriteOptions options, std::shared_ptr<Gate> gate = nullptr,
           FileSystem& files = FileSystem::real());
  // In a thread of the options' priority; the caller helps where that gets nothing done. Throws
  // Error(corruption) with the damaged block, Error(io), Error(stopped).
  Written run();
  // No rate and no gate from now on.
  void hurry();
  // run ends with Error(stopped), after the block in flight.
  void stop() noexcept {
    stopped_ = true;
    pace_.lift();
  }

 private:
  bool copy_next(Input& input, Output& output);

  std::string from_, to_;
  uint64_t size_;
  std::vector<uint32_t> crcs_;
  WriteOptions options_;
  std::shared_ptr<Gate> gate_;
  FileSystem& files_;
  Pace pace_;
  Lowered lowered_;
  std::atomic<bool> stopped_{false};
  std::atomic<bool> hurried_{false};
  std::atomic<uint64_t> next_{0};
  std::atomic<int64_t> cpu_ns_{0};
};

// What reading a file found.
struct ReadReport {
  std::vector<uint64_t> damaged;  // blocks whose bytes are not those written, in order
  double seconds = 0;
};

// A file that is read in runs of blocks, past the page cache where that goes; each block is checked.
// Thread-safety: all functions, from any thread.
class CheckedFile {
 public:
  // Throws Error(io), Error(corruption) if the file is shorter or longer.
  CheckedFile(std::string path, uint64_t size, std::vector<uint32_t> crcs,
              FileSystem& files = FileSystem::real());
  ~CheckedFile();
  // Reads `count` blocks, from number `first` on, by `threads` threads. `into` has room for whole
  // blocks and is aligned (kAlignment), or is null: then they are only checked. `progress`, if
  // given, counts bytes. Throws Error(io), Error(corruption) if the file has become shorter.
  ReadReport read(uint64_t first, uint64_t count, std::byte* into, unsigned threads,
                  std::atomic<uint64_t>* progress = nullptr,
                  Priority priority = Priority::normal) const;

 private:
  uint64_t size_;
  std::vector<uint32_t> crcs_;
  std::unique_ptr<Input> input_;
};

// Reads the `size` bytes of a file by `threads` threads, past the page cache where that goes, and
// checks each block. `into` holds whole blocks (Memory of that size), or nothing: then the file is
// only checked. `progress`, if given, counts bytes.
// Throws Error(io), Error(corruption) if the file is shorter or longer.
ReadReport read_checked(const std::string& path, uint64_t size, std::span<const uint32_t> crcs,
                        Memory* into, unsigned threads, std::atomic<uint64_t>* progress = nullptr,
                        Priority priority = Priority::normal,
                        FileSystem& files = FileSystem::real());

}  // namespace nostall::checkpoint
