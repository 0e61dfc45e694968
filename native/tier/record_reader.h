// tier/record_reader.h - records of tier files, many at once.
//
// Reads begin one at a time, by plain calls. While these wait for a device, the records go side by
// side through an io_uring; what the ring fails to read is read by a plain call, which says why.
// Thread-safety: a RecordReader belongs to one thread; `refused` is shared by those of a cache.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/cold_reads.h"
#include "base/error.h"
#include "base/file.h"
#include "tier/record.h"

namespace nostall::tier {

// One record, and its checksum or the Error, as read_record gives them.
struct RecordRead {
  int fd = -1;
  uint64_t offset = 0;
  uint64_t sample = 0;
  std::span<std::byte> into;
  Result<uint32_t> sum = uint32_t{0};
  std::array<std::byte, kRecordHeader> header{};
};

class RecordReader {
 public:
  // At most `depth` reads in flight; `seen` is what is known of the disk.
  RecordReader(unsigned depth, std::atomic<bool>& refused, ColdReads seen = {});
  ~RecordReader();
  RecordReader(const RecordReader&) = delete;
  RecordReader& operator=(const RecordReader&) = delete;

  // Fills `sum` of each.
  void read(FileSystem& files, std::span<RecordRead> reads);
  // Whether reads go side by side now.
  bool many() const noexcept;

 private:
  class Rings;
  const unsigned depth_;
  std::atomic<bool>& refused_;
  ColdReads cold_;
  std::unique_ptr<Rings> ring_;
};

}  // namespace nostall::tier
