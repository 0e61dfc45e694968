// The scan of LMDB files must take any bytes: it gives records inside the file of which no two
// share a byte, or an error. Named databases are scanned as well.
#include <algorithm>
#include <cstdlib>

#include "../tests/native/records/memory_storage.h"
#include "records/lmdb.h"

namespace {

using namespace nostall::records;
using namespace nostall::source;

void require(bool holds) {
  if (!holds) std::abort();
}

void check(const lmdb::Records& r, uint64_t size) {
  std::vector<std::pair<uint64_t, uint64_t>> extents;
  require(r.offset.size() == r.size() && r.own_pages.size() == r.size());
  require(r.key_ends.size() == r.size() + 1 && r.key_ends.back() == r.keys.size());
  require(r.databases.size() == r.database_trees.size());
  require(r.keys.size() <= size && r.pages_read * r.snapshot.page_size <= size);
  for (size_t i = 0; i < r.size(); ++i) {
    require(r.offset[i] <= size && r.length[i] <= size - r.offset[i]);
    extents.emplace_back(r.offset[i], r.offset[i] + r.length[i]);
  }
  std::sort(extents.begin(), extents.end());
  for (size_t i = 1; i < extents.size(); ++i) require(extents[i - 1].second <= extents[i].first);
  static_cast<void>(lmdb::stamp(r, "x"));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const MemoryStorage storage({std::string(reinterpret_cast<const char*>(data), size)});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  const auto main = lmdb::scan(*reader, storage);
  if (!main) return 0;
  check(main.value(), size);
  for (size_t i = 0; i < std::min<size_t>(4, main.value().databases.size()); ++i) {
    const auto named = lmdb::scan(*reader, storage, main.value().databases[i]);
    if (named) check(named.value(), size);
  }
  return 0;
}
