// Walks a TFRecord file: length, CRC of the length, record, CRC of the record, repeated.
#include "records/tfrecord.h"

#include <algorithm>
#include <string>

#include "base/crc32c.h"

namespace nostall::records {
namespace {

constexpr uint64_t kBefore = 12, kAfter = 4;
constexpr size_t kStep = 256 << 10;

uint64_t little(std::span<const std::byte> b) {
  uint64_t value = 0;
  for (size_t i = 0; i < b.size(); ++i) value |= uint64_t{uint8_t(b[i])} << (8 * i);
  return value;
}

constexpr uint32_t kMask = 0xa282ead8u;
uint32_t masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + kMask; }
uint32_t unmasked(uint32_t word) {
  word -= kMask;
  return (word << 15) | (word >> 17);
}

}  // namespace

Result<TfRecords> scan_tfrecord(FileWindow& window, bool check) {
  TfRecords records;
  uint64_t at = 0;
  const auto damaged = [&](const std::string& what) -> Error {
    if (window.error()) return *window.error();
    return Error(ErrorKind::corruption, window.path() + ": record " +
                                            std::to_string(records.length.size()) + " at offset " +
                                            std::to_string(at) + " " + what);
  };
  while (at < window.file_size()) {
    const auto head = window.get(at, kBefore);
    if (head.empty()) return damaged("is cut off");
    const uint64_t length = little(head.first(8));
    if (little(head.subspan(8)) != masked(crc32c(head.first(8)))) {
      return damaged(
          "has a damaged length (its CRC is wrong): this is no TFRecord file, or it is "
          "compressed");
    }
    const uint64_t data = at + kBefore;
    const uint64_t left = window.file_size() - data;
    if (left < kAfter || length > left - kAfter) return damaged("is cut off");
    uint32_t crc = 0;
    for (uint64_t done = 0; check && done < length;) {
      const auto size = static_cast<size_t>(std::min<uint64_t>(kStep, length - done));
      const auto bytes = window.get(data + done, size);
      if (bytes.empty()) return damaged("cannot be read");
      crc = crc32c(bytes, crc);
      done += size;
    }
    const auto after = window.get(data + length, kAfter);
    if (after.empty()) return damaged("cannot be read");
    const uint32_t said = unmasked(static_cast<uint32_t>(little(after)));
    if (check && said != crc) return damaged("is damaged (its CRC is wrong)");
    records.crc.push_back(said);
    records.offset.push_back(data);
    records.length.push_back(length);
    at = data + length + kAfter;
  }
  return records;
}

}  // namespace nostall::records
