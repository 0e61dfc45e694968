// records/file_window.h - a moving read-ahead window on one file, for formats in which each part
// says where the next one is. Small jumps are read through, large ones skipped, unless the storage
// answers so late that reading through them was measured to be quicker. Thread-safety: belongs to
// one thread. Errors: none thrown; see get().
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "records/ranges.h"

namespace nostall::records {

class FileWindow {
 public:
  // Reads ahead up to `ahead` bytes while what is asked for lies close together.
  FileWindow(RangeReader& reader, const Storage& storage, uint32_t file, size_t ahead = 256 << 10)
      : reader_(reader), storage_(storage), file_(file), most_(ahead) {}

  uint64_t file_size() const { return storage_.files()[file_].size; }
  const std::string& path() const { return storage_.files()[file_].path; }
  uint32_t file() const { return file_; }

  // `size` bytes at `offset`, valid until the next call; empty if they do not lie inside the file
  // or cannot be read: see error().
  std::span<const std::byte> get(uint64_t offset, size_t size);
  // Why the last get() gave nothing, if the storage refused.
  const std::optional<Error>& error() const { return error_; }

 private:
  // Whether to read on from the window's end to `offset`, and further.
  bool worth_reading_through(uint64_t offset);
  void measured(uint64_t bytes, double seconds);

  RangeReader& reader_;
  const Storage& storage_;
  uint32_t file_;
  size_t most_, ahead_ = 4096;
  // Of reads that skip, seconds each and the bytes that they skip, and of those that read through,
  // seconds per byte; 0: none yet.
  double skipping_ = 0.0, skipped_ = 0.0, through_ = 0.0;
  uint64_t begin_ = 0;
  std::vector<std::byte> bytes_;
  std::optional<Error> error_;
};

}  // namespace nostall::records
