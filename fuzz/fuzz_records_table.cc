// The parser of stored record tables must take any bytes: it gives a table that serialises back to
// the same bytes, or an error; and a source of it refuses samples outside of their file. The
// checksum is repaired first, or nothing would get past it.
#include <cstdlib>

#include "../tests/native/records/memory_storage.h"
#include "base/crc32c.h"
#include "records/records.h"

namespace {

using namespace nostall::records;
using namespace nostall::source;

void require(bool holds) {
  if (!holds) std::abort();
}

// A few kilobytes of which every byte tells its place.
std::shared_ptr<const MemoryStorage> storage() {
  static const auto instance = [] {
    std::string content(4096, '\0');
    for (size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i ^ (i >> 8));
    return std::make_shared<MemoryStorage>(std::vector<std::string>(3, content));
  }();
  return instance;
}

// Every field is inside of the record.
void locate_all(const RecordSource& source, uint64_t sample, std::span<const std::byte> record) {
  std::vector<FieldBytes> fields(source.fields());
  require(bool(source.locate(sample, record, fields)));
  if (source.table().parts == 0) return;
  for (const FieldBytes& field : fields) {
    require(field.present || field.bytes.empty());
    if (field.bytes.empty()) continue;
    require(field.bytes.data() >= record.data() &&
            field.bytes.data() + field.bytes.size() <= record.data() + record.size());
  }
}

void read_all(RecordTable table) {
  try {
    const RecordSource source(storage(), std::move(table), {});
    const size_t n = std::min<uint64_t>(64, source.size());
    std::vector<std::vector<std::byte>> memory(n);
    std::vector<ReadRequest> requests(n);
    for (size_t i = 0; i < n; ++i) {
      memory[i].resize(source.sizes()[i]);
      requests[i].sample = i;
      requests[i].into = memory[i];
    }
    source.make_reader(ReaderKind::pread, 4)->read(requests);
    for (size_t i = 0; i < n; ++i) {
      require(requests[i].error == 0);
      for (size_t k = 0; k < memory[i].size(); ++k) {
        const uint64_t at = source.table().offset[i] + k;
        require(memory[i][k] == std::byte((at ^ (at >> 8)) & 0xff));
      }
      std::vector<uint64_t> around;
      source.around(i, around);
      for (const uint64_t s : around) require(s < source.size() && s != i);
      locate_all(source, i, memory[i]);
    }
  } catch (const nostall::Error& e) {
    require(e.kind() == nostall::ErrorKind::corruption);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  static_cast<void>(parse_records(bytes));
  if (size < 4) return 0;
  const uint32_t crc = nostall::crc32c(std::span(bytes).first(size - 4));
  for (size_t i = 0; i < 4; ++i) bytes[size - 4 + i] = std::byte((crc >> (8 * i)) & 0xff);
  auto table = parse_records(bytes);
  if (!table) return 0;
  require(serialize_records(table.value()) == bytes);
  read_all(std::move(table).take());
  return 0;
}
