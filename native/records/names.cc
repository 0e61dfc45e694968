// Names of samples for messages: one scan fills a table of places and names, guarded by a mutex;
// after a failed scan the next one is made no earlier than `again`.
#include "records/names.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "records/file_window.h"
#include "records/lmdb.h"
#include "records/tar.h"

namespace nostall::records {
namespace {

constexpr int64_t kTryAgainNs = 30'000'000'000;

struct Named {
  uint64_t begin = 0, end = 0;  // where its bytes lie
  std::string name;
};
using Scan = std::function<std::optional<std::vector<Named>>(const KeptTable&, uint32_t file)>;

class Names {
 public:
  explicit Names(Scan scan) : scan_(std::move(scan)) {}

  std::string of(const KeptTable& table, uint64_t sample) {
    const MutexLock lock(mutex_);
    const uint32_t number = table.file_of(sample);
    File& file = files_[number];
    if (!file.known && now_ns() >= file.again) {
      if (auto names = scan_(table, number)) {
        file.names = std::move(*names);
        file.known = true;
        std::sort(file.names.begin(), file.names.end(),
                  [](const Named& a, const Named& b) { return a.begin < b.begin; });
      } else {
        file.again = now_ns() + kTryAgainNs;
      }
    }
    const uint64_t at = table.offset[sample];
    const auto after =
        std::upper_bound(file.names.begin(), file.names.end(), at,
                         [](uint64_t value, const Named& n) { return value < n.begin; });
    if (after == file.names.begin() || at > std::prev(after)->end) return {};
    return std::prev(after)->name;
  }

 private:
  struct File {
    bool known = false;
    int64_t again = 0;  // not before
    std::vector<Named> names;
  };
  const Scan scan_;
  Mutex mutex_;
  std::map<uint32_t, File> files_ NOSTALL_GUARDED_BY(mutex_);
};

NameOf names_by(Scan scan) {
  return [names = std::make_shared<Names>(std::move(scan))](
             const KeptTable& table, uint64_t sample) { return names->of(table, sample); };
}

}  // namespace

NameOf tar_names(std::shared_ptr<const Storage> storage) {
  return names_by([storage = std::move(storage)](
                      const KeptTable&, uint32_t file) -> std::optional<std::vector<Named>> {
    const auto reader = storage->make_reader(source::ReaderKind::pread, 1);
    FileWindow window(*reader, *storage, file);
    auto members = scan_tar(window);
    if (!members || !storage->changed(file).empty()) return {};
    std::vector<Named> names;
    for (TarMember& m : members.value()) {
      if (m.kind != TarKind::file) continue;
      names.push_back({m.offset, m.offset + m.size, std::move(m.name)});
    }
    return names;
  });
}

NameOf lmdb_names(std::shared_ptr<const Storage> storage, std::string database) {
  return names_by([storage = std::move(storage), database = std::move(database)](
                      const KeptTable& table, uint32_t) -> std::optional<std::vector<Named>> {
    const auto reader = storage->make_reader(source::ReaderKind::pread, 1);
    const auto scanned = lmdb::scan(*reader, *storage, database);
    if (!scanned) return {};
    const lmdb::Records& r = scanned.value();
    if (!table.stamp.starts_with(lmdb::stamp(r, database))) return {};
    std::vector<Named> names;
    names.reserve(r.size());
    for (uint64_t i = 0; i < r.size(); ++i) {
      names.push_back({r.offset[i], r.offset[i] + r.length[i], std::string(r.key(i))});
    }
    return names;
  });
}

}  // namespace nostall::records
