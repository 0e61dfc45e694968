// Taking a record apart must take any bytes: it gives members inside the record, or an error. The
// first byte chooses the format, the second how much of the file follows the record.
#include <cstdlib>

#include "../tests/native/records/memory_storage.h"
#include "records/members.h"

using namespace nostall::records;
using namespace nostall::source;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const uint64_t offset = 2, after = std::min<uint64_t>(data[1], size - 2);
  const uint64_t length = size - 2 - after;
  const MemoryStorage storage({std::string(reinterpret_cast<const char*>(data), size)});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  FileWindow window(*reader, storage, 0);
  const auto found = find_members(window, offset, length, static_cast<MembersKind>(data[0] % 3));
  if (!found) return 0;
  for (const Member& m : found.value()) {
    const bool inside =
        m.type == MemberType::none || (m.offset >= offset && m.offset <= offset + length &&
                                       m.length <= offset + length - m.offset);
    if (!inside) std::abort();
  }
  return 0;
}
