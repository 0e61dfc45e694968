// Looking for the image and label of a record must take any bytes: it gives a payload inside the
// record, or an error. The first byte chooses the kind, the second how much of the file follows the
// record.
#include <cstdlib>

#include "../tests/native/records/memory_storage.h"
#include "records/payload.h"

using namespace nostall::records;
using namespace nostall::source;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const uint64_t offset = 2, after = std::min<uint64_t>(data[1], size - 2);
  const uint64_t length = size - 2 - after;
  const MemoryStorage storage({std::string(reinterpret_cast<const char*>(data), size)});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  FileWindow window(*reader, storage, 0);
  const auto found = data[0] % 4 == 0   ? find_datum(window, offset, length)
                     : data[0] % 4 == 1 ? find_pickled(window, offset, length)
                     : data[0] % 4 == 2 ? find_example(window, offset, length, "image", "")
                                        : find_example(window, offset, length, "image", "label");
  if (!found) return 0;
  const Payload& p = found.value();
  const bool inside =
      p.offset >= offset && p.offset <= offset + length && p.length <= offset + length - p.offset;
  const bool shaped = p.channels == 0 || uint64_t{p.channels} * p.height * p.width == p.length;
  if (!inside || !shaped) std::abort();
  return 0;
}
