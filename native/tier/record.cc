// Records of tier files and their manifest, as docs/formats/tier.md defines them.
#include "tier/record.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/crc32c.h"
#include "base/sums.h"

namespace nostall::tier {
namespace {

constexpr uint32_t kRecordMagic = 0x3252534e;    // "NSR2"
constexpr uint32_t kManifestMagic = 0x324d534e;  // "NSM2"
constexpr uint32_t kVersion = 2;
constexpr size_t kManifestHeader = 32, kManifestEntry = 20, kManifestTail = 4;
constexpr size_t kManifestPiece = 64 << 10;  // that is written at once

void put(std::byte* at, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>((value >> (8 * i)) & 0xff);
}

uint64_t get(const std::byte* at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value |= uint64_t{uint8_t(at[i])} << (8 * i);
  return value;
}

std::array<std::byte, kRecordHeader> header_of(uint64_t sample, uint32_t sum, uint64_t length) {
  std::array<std::byte, kRecordHeader> header{};
  put(header.data(), kRecordMagic, 4);
  put(header.data() + 4, length, 4);
  put(header.data() + 8, sample, 8);
  put(header.data() + 16, sum, 4);
  return header;
}

Error damaged(const std::string& what) {
  return Error(ErrorKind::corruption, "damaged manifest: " + what);
}

}  // namespace

int write_record(FileSystem& files, int fd, uint64_t offset, uint64_t sample, uint32_t sum,
                 std::span<const std::byte> bytes) {
  const int64_t n = files.pwrite(fd, bytes, offset + kRecordHeader);
  if (n < 0) return static_cast<int>(n);
  const auto header = header_of(sample, sum, bytes.size());
  const int64_t m = files.pwrite(fd, header, offset);
  return m < 0 ? static_cast<int>(m) : 0;
}

Result<uint32_t> read_record(FileSystem& files, int fd, uint64_t offset, uint64_t sample,
                             std::span<std::byte> into) {
  std::array<std::byte, kRecordHeader> header{};
  const int64_t n = files.pread(fd, header, offset);
  const int64_t m = n == kRecordHeader ? files.pread(fd, into, offset + kRecordHeader) : n;
  if (n < 0 || m < 0) return io_error("cannot read", "a record", static_cast<int>(-m));
  if (n != kRecordHeader || static_cast<size_t>(m) != into.size()) {
    return Error(ErrorKind::corruption, "a record is cut short");
  }
  return check_record(header, sample, into);
}

Result<uint32_t> check_record(std::span<const std::byte, kRecordHeader> header, uint64_t sample,
                              std::span<const std::byte> bytes) {
  const uint32_t sum = sample_sum(bytes);
  if (!std::ranges::equal(header, header_of(sample, sum, bytes.size()))) {
    return Error(ErrorKind::corruption, "the CRC32C or the header of a record is wrong");
  }
  return sum;
}

uint64_t manifest_bytes(uint64_t records) noexcept {
  return kManifestHeader + records * kManifestEntry + kManifestTail;
}

int write_manifest(uint64_t dataset, uint64_t stamp, uint64_t count,
                   const std::function<KeptRecord()>& next,
                   const std::function<int(std::span<const std::byte>)>& write) {
  std::vector<std::byte> piece(kManifestHeader);
  put(piece.data(), kManifestMagic, 4);
  put(piece.data() + 4, kVersion, 4);
  put(piece.data() + 8, dataset, 8);
  put(piece.data() + 16, stamp, 8);
  put(piece.data() + 24, count, 8);
  uint32_t crc = 0;
  for (uint64_t i = 0; i < count;) {
    for (; i < count && piece.size() < kManifestPiece; ++i) {
      const KeptRecord r = next();
      piece.resize(piece.size() + kManifestEntry);
      std::byte* at = piece.data() + piece.size() - kManifestEntry;
      put(at, r.sample, 8);
      put(at + 8, r.offset, 8);
      put(at + 16, r.sum, 4);
    }
    if (i == count) break;
    crc = crc32c(piece, crc);
    if (const int error = write(piece)) return error;
    piece.clear();
  }
  crc = crc32c(piece, crc);
  piece.resize(piece.size() + kManifestTail);
  put(piece.data() + piece.size() - kManifestTail, crc, kManifestTail);
  return write(piece);
}

Result<Manifest> parse_manifest(std::span<const std::byte> bytes, uint64_t dataset) {
  if (bytes.size() < manifest_bytes(0)) return damaged("it is too short");
  const auto content = bytes.first(bytes.size() - kManifestTail);
  if (get(bytes.data() + content.size(), kManifestTail) != crc32c(content)) {
    return damaged("wrong checksum");
  }
  if (get(content.data(), 4) != kManifestMagic) return damaged("wrong magic");
  if (get(content.data() + 4, 4) != kVersion) return damaged("unknown version");
  if (get(content.data() + 8, 8) != dataset) return damaged("it is of another data set");
  const uint64_t count = get(content.data() + 24, 8);
  if (count != (content.size() - kManifestHeader) / kManifestEntry ||
      (content.size() - kManifestHeader) % kManifestEntry != 0) {
    return damaged("its length is wrong");
  }
  Manifest manifest;
  manifest.stamp = get(content.data() + 16, 8);
  manifest.records.resize(count);
  const std::byte* at = content.data() + kManifestHeader;
  for (KeptRecord& r : manifest.records) {
    r = {get(at, 8), get(at + 8, 8), static_cast<uint32_t>(get(at + 16, 4))};
    at += kManifestEntry;
  }
  return manifest;
}

}  // namespace nostall::tier
