// Options of record sources by the kind of their table.
#include "records/formats.h"

#include "records/lmdb.h"
#include "records/names.h"

namespace nostall::records {
namespace {

// The page header before a value says which page it is and how many pages the value has.
CheckHead lmdb_check(uint32_t page_size) {
  return [page_size](const KeptTable& table, uint64_t sample, std::span<const std::byte> head) {
    const uint64_t head_size = table.head_of(sample);
    const uint64_t begin = table.offset[sample] - head_size;
    const uint64_t bytes = head_size + table.length[sample];
    return lmdb::check_value_page(head, begin / page_size, (bytes + page_size - 1) / page_size);
  };
}

SameFile lmdb_same(std::shared_ptr<const Storage> storage, const std::string& database) {
  return [storage = std::move(storage), database](RangeReader& reader, const KeptTable& table,
                                                  uint32_t) {
    const auto now = lmdb::current_stamp(reader, *storage, database);
    // In a table's stamp, options and what the scan found follow the stamp of the database.
    return now && (table.stamp + " ").starts_with(now.value() + " ");
  };
}

// A writer may commit without the file getting another time: through a map of a file in memory
// (writemap=True on tmpfs), or to pages that are still to be written to the disk.
StateOf lmdb_state(std::shared_ptr<const Storage> storage) {
  return [storage = std::move(storage)](uint32_t) { return lmdb::newest_transaction(*storage); };
}

}  // namespace

RecordOptions options_for(const RecordTable& table, std::shared_ptr<const Storage> storage,
                          const std::string& database, uint32_t page_size) {
  RecordOptions options;
  if (table.kind == "tar") options.name = tar_names(storage);
  if (table.kind == "lmdb") {
    options.name = lmdb_names(storage, database);
    options.state = lmdb_state(storage);
    options.same = lmdb_same(std::move(storage), database);
  }
  if (page_size != 0) options.check = lmdb_check(page_size);
  return options;
}

}  // namespace nostall::records
