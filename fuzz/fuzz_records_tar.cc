// The scan of tar archives must take any bytes: it gives members inside the file, one after the
// other, and links to the places of these, with names of bounded size, or an error. Checksums of headers are repaired first, or few
// inputs would get past the first one.
#include <cstdlib>
#include <map>

#include "../tests/native/records/memory_storage.h"
#include "records/tar.h"

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
  const auto members = scan_tar(window, ".cls");
  if (!members) return false;
  uint64_t end = 0;
  std::map<uint64_t, uint64_t> files;  // sizes, by place
  for (const TarMember& m : members.value()) {
    require(m.name.size() <= 4096 && m.content.size() <= 64);
    require(m.content.empty() || bytes.compare(m.offset, m.size, m.content) == 0);
    if (m.kind == TarKind::unread_link) {
      require(m.offset == 0 && m.size == 0 && m.content.empty());
    } else if (m.kind == TarKind::hard_link) {
      require(files.contains(m.offset) && files[m.offset] == m.size);
    } else {
      require(m.offset >= end + 512 && m.offset <= bytes.size());
      require(m.size <= bytes.size() - m.offset);
      files[m.offset] = m.size;
      end = m.offset + m.size;
    }
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  if (scan_and_check(bytes)) return 0;
  for (size_t at = 0; at + 512 <= bytes.size(); at += 512) {
    // Blocks that look like headers: with one of the two dialects' marks.
    if (bytes.compare(at + 257, 5, "ustar") != 0) continue;
    uint64_t sum = 0;
    for (size_t i = 0; i < 512; ++i) sum += i >= 148 && i < 156 ? ' ' : uint8_t(bytes[at + i]);
    char text[8];
    std::snprintf(text, sizeof text, "%06llo", static_cast<unsigned long long>(sum));
    bytes.replace(at + 148, 8, std::string(text, 7) + ' ');
  }
  scan_and_check(bytes);
  return 0;
}
