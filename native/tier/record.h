// tier/record.h - what lies in a tier file and in its manifest (docs/formats/tier.md, version 2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace nostall::tier {

// In front of every sample of a file tier: magic, length, sample, its checksum, zero; all
// little-endian.
inline constexpr uint32_t kRecordHeader = 24;

// Writes the bytes, then the header, so that a torn write leaves no valid record. `sum` is the
// sample's checksum (base/sums.h). 0 or -errno.
int write_record(FileSystem& files, int fd, uint64_t offset, uint64_t sample, uint32_t sum,
                 std::span<const std::byte> bytes);
// Fills `into`, checks header and checksum and gives the latter; else an Error of kind io or
// corruption.
Result<uint32_t> read_record(FileSystem& files, int fd, uint64_t offset, uint64_t sample,
                             std::span<std::byte> into);

// The same of a record that was read: `header` in front, then `bytes`.
Result<uint32_t> check_record(std::span<const std::byte, kRecordHeader> header, uint64_t sample,
                              std::span<const std::byte> bytes);

// A sample that a kept tier file holds.
struct KeptRecord {
  uint64_t sample = 0, offset = 0;
  uint32_t sum = 0;
  friend bool operator==(const KeptRecord&, const KeptRecord&) = default;
};
struct Manifest {
  uint64_t stamp = 0;  // Source::stamp() of the source that the bytes are of
  std::vector<KeptRecord> records;
};
// Gives the bytes of a manifest of `count` records to `write`, in pieces one after the other; 0, or the
// first number other than 0 that it returns. `next` gives the records.
int write_manifest(uint64_t dataset, uint64_t stamp, uint64_t count,
                   const std::function<KeptRecord()>& next,
                   const std::function<int(std::span<const std::byte>)>& write);
// Total: any bytes give a manifest or an Error of kind corruption, also for another data set.
Result<Manifest> parse_manifest(std::span<const std::byte> bytes, uint64_t dataset);
// Bytes of a manifest of so many records.
uint64_t manifest_bytes(uint64_t records) noexcept;

}  // namespace nostall::tier
