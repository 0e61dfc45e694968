// records/lmdb.h - where the values of an LMDB database lie, found without liblmdb and without mmap.
//
// LMDB (0.9, data version 1) is a B+ tree of pages in one file, copied on write. The scan reads the
// meta pages, then the branch and leaf pages of one tree, level by level and many at a time, and no
// page of a large value: those lie contiguous on overflow pages of their own. Everything it reads
// is checked against everything else (levels, counts, key order, bounds, overlaps); parsing is
// total, any bytes give a scan or an Error: io, corruption, or usage for what is refused by name
// (data version 2, DUPSORT, a database that is not there). A writer that commits while the scan
// runs makes it start again, a few times. Thread-safety: free functions over one thread's reader.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "records/ranges.h"

namespace nostall::records::lmdb {

inline constexpr uint32_t kPageHeader = 16;

// One tree, as a meta page or a named database's record describes it.
struct Tree {
  uint16_t flags = 0, depth = 0;
  uint64_t branch_pages = 0, leaf_pages = 0, overflow_pages = 0, entries = 0;
  uint64_t root = 0;  // page number; kNoPage when empty

  bool operator==(const Tree&) const = default;
};
inline constexpr uint64_t kNoPage = ~uint64_t{0};

// What one committed transaction left.
struct Snapshot {
  uint32_t page_size = 0;
  uint64_t transaction = 0;
  uint64_t last_page = 0;  // that the file has
  // Pages that the transaction allocated; the last ones may never have been written, if they were
  // freed again at once.
  uint64_t allocated = 0;
  Tree free, main;
  bool other_meta_used = false;  // one meta page was damaged

  bool operator==(const Snapshot&) const = default;
};

enum Flags : uint16_t { kReverseKey = 0x02, kDupSort = 0x04, kIntegerKey = 0x08 };

// The newer of the two meta pages that is sound.
Result<Snapshot> read_snapshot(RangeReader& reader, const Storage& storage);

struct Records {
  Snapshot snapshot;
  Tree tree;  // the one that was scanned
  // In key order. A value that has pages of its own starts kPageHeader bytes into them.
  std::vector<uint64_t> offset, length;
  std::vector<uint8_t> own_pages;
  std::string keys;
  std::vector<uint64_t> key_ends{0};   // key i is keys[key_ends[i], key_ends[i + 1])
  std::vector<std::string> databases;  // names of the databases that the scanned tree holds
  std::vector<Tree> database_trees;    // one each
  uint64_t pages_read = 0;             // branch and leaf pages
  std::vector<uint64_t> leaf_page;     // page numbers of the leaves, in key order

  uint64_t size() const noexcept { return length.size(); }
  std::string_view key(uint64_t record) const noexcept {
    return std::string_view(keys).substr(key_ends[record], key_ends[record + 1] - key_ends[record]);
  }
};

// All records of the main database, or of the named one.
Result<Records> scan(RangeReader& reader, const Storage& storage, std::string_view database = {});

// Why the page header before a value with at least `pages` pages of its own cannot be right, or an
// empty string.
std::string check_value_page(std::span<const std::byte> header, uint64_t page, uint64_t pages);

// What an index depends on: a database with another stamp has another index.
std::string stamp(const Records& records, std::string_view database);
// The stamp that a scan would have now; reads the meta pages and, for a named database, the main
// one's.
Result<std::string> current_stamp(RangeReader& reader, const Storage& storage,
                                  std::string_view database);

// The number of the newest transaction, by two calls of Storage::peek; nothing where there are none.
std::optional<uint64_t> newest_transaction(const Storage& storage);

// The keys as numbers, kNoNumber for those that are not decimal.
std::vector<uint64_t> decimal_keys(const Records& records);
inline constexpr uint64_t kNoNumber = ~uint64_t{0};

}  // namespace nostall::records::lmdb
