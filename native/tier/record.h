// tier/record.h - what lies in a tier file and in its manifest (docs/formats/tier.md, version 1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "plan/placement.h"

namespace nostall::tier {

// In front of every sample of a file tier: magic, length, sample, CRC32C of the bytes, zero; all
// little-endian.
inline constexpr uint32_t kRecordHeader = 24;

// Writes the bytes, then the header, so that a torn write leaves no valid record. 0 or -errno.
int write_record(FileSystem& files, int fd, uint64_t offset, uint64_t sample,
                 std::span<const std::byte> bytes);
// Fills `into` and checks header and CRC32C; an Error of kind io or corruption otherwise.
Result<std::monostate> read_record(FileSystem& files, int fd, uint64_t offset, uint64_t sample,
                                   std::span<std::byte> into);

// The samples that a kept tier file holds.
std::vector<std::byte> serialize_manifest(uint64_t dataset,
                                          std::span<const plan::Resident> residents);
// Total: any bytes give the residents or an Error of kind corruption, also for another data set.
Result<std::vector<plan::Resident>> parse_manifest(std::span<const std::byte> bytes,
                                                   uint64_t dataset);

}  // namespace nostall::tier
