// The scan of TFRecord files must take any bytes: records inside the file, one after the other, or
// an error; what passes with the checksums of the data passes without. Checksums are repaired
// first, or nothing would get past them.
#include <cstdlib>

#include "../tests/native/records/memory_storage.h"
#include "base/crc32c.h"
#include "records/tfrecord.h"

namespace {

using namespace nostall::records;
using namespace nostall::source;

void require(bool holds) {
  if (!holds) std::abort();
}

bool scan_and_check(const std::string& bytes) {
  const MemoryStorage storage({bytes});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  FileWindow window(*reader, storage, 0);
  const auto strict = scan_tfrecord(window, true), quick = scan_tfrecord(window, false);
  if (!quick) {
    require(!strict);
    return false;
  }
  uint64_t end = 0;
  for (size_t i = 0; i < quick.value().offset.size(); ++i) {
    require(quick.value().offset[i] == end + 12);
    require(quick.value().length[i] <= bytes.size() - quick.value().offset[i]);
    end = quick.value().offset[i] + quick.value().length[i] + 4;
  }
  require(end == bytes.size());
  if (strict) require(strict.value().offset == quick.value().offset);
  return static_cast<bool>(strict);
}

void put_crc(std::string& bytes, size_t from, size_t size, size_t at) {
  const auto all = std::as_bytes(std::span(bytes));
  const uint32_t crc = nostall::crc32c(all.subspan(from, size));
  const uint32_t masked = ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
  for (size_t i = 0; i < 4; ++i) bytes[at + i] = static_cast<char>(masked >> (8 * i));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  scan_and_check(bytes);
  size_t at = 0;
  while (at + 16 <= bytes.size()) {
    put_crc(bytes, at, 8, at + 8);
    uint64_t length = 0;
    for (size_t i = 0; i < 8; ++i) length |= uint64_t{uint8_t(bytes[at + i])} << (8 * i);
    if (length > bytes.size() - at - 16) break;
    put_crc(bytes, at + 12, length, at + 12 + length);
    at += 16 + length;
  }
  // All that was framed is found.
  const bool sound = scan_and_check(bytes);
  require(sound == (at == bytes.size()));
  return 0;
}
