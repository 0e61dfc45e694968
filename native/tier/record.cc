#include "tier/record.h"

#include <array>
#include <cstring>

#include "base/crc32c.h"

namespace nostall::tier {
namespace {

constexpr uint32_t kRecordMagic = 0x3152534e;    // "NSR1"
constexpr uint32_t kManifestMagic = 0x314d534e;  // "NSM1"
constexpr uint32_t kVersion = 1;
constexpr size_t kManifestHeader = 24, kManifestEntry = 16;

void put(std::byte* at, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>((value >> (8 * i)) & 0xff);
}

uint64_t get(const std::byte* at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value |= uint64_t{uint8_t(at[i])} << (8 * i);
  return value;
}

std::array<std::byte, kRecordHeader> header_of(uint64_t sample, std::span<const std::byte> bytes) {
  std::array<std::byte, kRecordHeader> header{};
  put(header.data(), kRecordMagic, 4);
  put(header.data() + 4, bytes.size(), 4);
  put(header.data() + 8, sample, 8);
  put(header.data() + 16, crc32c(bytes), 4);
  return header;
}

Error damaged(const std::string& what) {
  return Error(ErrorKind::corruption, "damaged manifest: " + what);
}

}  // namespace

int write_record(FileSystem& files, int fd, uint64_t offset, uint64_t sample,
                 std::span<const std::byte> bytes) {
  const int64_t n = files.pwrite(fd, bytes, offset + kRecordHeader);
  if (n < 0) return static_cast<int>(n);
  const auto header = header_of(sample, bytes);
  const int64_t m = files.pwrite(fd, header, offset);
  return m < 0 ? static_cast<int>(m) : 0;
}

Result<std::monostate> read_record(FileSystem& files, int fd, uint64_t offset, uint64_t sample,
                                   std::span<std::byte> into) {
  std::array<std::byte, kRecordHeader> header{};
  const int64_t n = files.pread(fd, header, offset);
  const int64_t m = n == kRecordHeader ? files.pread(fd, into, offset + kRecordHeader) : n;
  if (n < 0 || m < 0) return Error(ErrorKind::io, "cannot read a record", static_cast<int>(-m));
  if (n != kRecordHeader || static_cast<size_t>(m) != into.size()) {
    return Error(ErrorKind::corruption, "a record is cut short");
  }
  if (header != header_of(sample, into)) {
    return Error(ErrorKind::corruption, "the CRC32C or the header of a record is wrong");
  }
  return std::monostate{};
}

std::vector<std::byte> serialize_manifest(uint64_t dataset,
                                          std::span<const plan::Resident> residents) {
  std::vector<std::byte> out(kManifestHeader + residents.size() * kManifestEntry + 4);
  put(out.data(), kManifestMagic, 4);
  put(out.data() + 4, kVersion, 4);
  put(out.data() + 8, dataset, 8);
  put(out.data() + 16, residents.size(), 8);
  std::byte* at = out.data() + kManifestHeader;
  for (const plan::Resident& r : residents) {
    put(at, r.sample, 8);
    put(at + 8, r.offset, 8);
    at += kManifestEntry;
  }
  put(at, crc32c(std::span(out).first(out.size() - 4)), 4);
  return out;
}

Result<std::vector<plan::Resident>> parse_manifest(std::span<const std::byte> bytes,
                                                   uint64_t dataset) {
  if (bytes.size() < kManifestHeader + 4) return damaged("it is too short");
  const auto content = bytes.first(bytes.size() - 4);
  if (get(bytes.data() + content.size(), 4) != crc32c(content)) return damaged("wrong checksum");
  if (get(content.data(), 4) != kManifestMagic) return damaged("wrong magic");
  if (get(content.data() + 4, 4) != kVersion) return damaged("unknown version");
  if (get(content.data() + 8, 8) != dataset) return damaged("it is of another data set");
  const uint64_t count = get(content.data() + 16, 8);
  if (count != (content.size() - kManifestHeader) / kManifestEntry ||
      (content.size() - kManifestHeader) % kManifestEntry != 0) {
    return damaged("its length is wrong");
  }
  std::vector<plan::Resident> residents(count);
  const std::byte* at = content.data() + kManifestHeader;
  for (plan::Resident& r : residents) {
    r = {get(at, 8), get(at + 8, 8)};
    at += kManifestEntry;
  }
  return residents;
}

}  // namespace nostall::tier
