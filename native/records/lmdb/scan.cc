// The walk over branch and leaf pages, a level at a time.
#include <algorithm>
#include <charconv>
#include <compare>
#include <cstring>

#include "records/lmdb/page.h"

namespace nostall::records::lmdb {
namespace {

// A writer may commit this often during a scan before it is given up.
constexpr int kAttempts = 5;
constexpr uint64_t kPagesAtOnce = 1024;

// A page that is to be read, and the range of keys that may be in it.
struct Expected {
  uint64_t page = 0;
  std::string least;  // key of the branch node; empty for the first of its page
};

int compare_keys(std::string_view a, std::string_view b, uint16_t flags) {
  if (flags & kIntegerKey && a.size() == b.size() && (a.size() == 4 || a.size() == 8)) {
    uint64_t x = 0, y = 0;
    std::memcpy(&x, a.data(), a.size());
    std::memcpy(&y, b.data(), b.size());
    return x < y ? -1 : x > y;
  }
  if (flags & kReverseKey) {
    const auto by_end = std::lexicographical_compare_three_way(
        a.rbegin(), a.rend(), b.rbegin(), b.rend(), [](char x, char y) {
          return static_cast<unsigned char>(x) <=> static_cast<unsigned char>(y);
        });
    return by_end < 0 ? -1 : by_end > 0;
  }
  return a.compare(b) < 0 ? -1 : a.compare(b) > 0;
}

class Scan {
 public:
  Scan(RangeReader& reader, const Storage& storage, const Snapshot& snapshot, const Tree& tree)
      : reader_(reader), storage_(storage), snapshot_(snapshot), tree_(tree) {
    records_.snapshot = snapshot;
    records_.tree = tree;
  }

  Result<Records> run() {
    if (tree_.flags & kDupSort) {
      return Error(ErrorKind::usage,
                   path() +
                       " allows several values a key (DUPSORT), which is not read: copy it "
                       "into a database with one value a key");
    }
    if (tree_.root == kNoPage) return std::move(records_);
    // Counts are trusted as limits only when the file has room for them.
    if (tree_.leaf_pages > snapshot_.last_page || tree_.branch_pages > snapshot_.last_page) {
      return broken("its page counts are larger than the file");
    }
    std::vector<Expected> level{{tree_.root, {}}};
    for (unsigned depth = 1; depth < tree_.depth; ++depth) {
      if (auto error = descend(level)) return *error;
    }
    if (auto error = leaves(level)) return *error;
    if (branch_page_.size() != tree_.branch_pages) {
      return broken("it has " + std::to_string(branch_page_.size()) + " branch pages instead of " +
                    std::to_string(tree_.branch_pages));
    }
    if (records_.leaf_page.size() != tree_.leaf_pages) {
      return broken("it has " + std::to_string(records_.leaf_page.size()) +
                    " leaf pages instead of " + std::to_string(tree_.leaf_pages));
    }
    if (entries_ != tree_.entries) {
      return broken("it has " + std::to_string(entries_) + " records instead of " +
                    std::to_string(tree_.entries));
    }
    if (auto error = check_overlaps()) return *error;
    return std::move(records_);
  }

 private:
  std::string path() const { return storage_.files()[0].path; }
  Error broken(const std::string& what) const {
    const bool shorter = snapshot_.allocated > snapshot_.last_page + 1;
    return Error(ErrorKind::corruption,
                 path() + " is damaged: " + what +
                     (shorter ? "; it has " + std::to_string(snapshot_.last_page + 1) +
                                    " pages instead of " + std::to_string(snapshot_.allocated) +
                                    ": it was cut off"
                              : ""));
  }
  Error broken_page(uint64_t page, const std::string& what) const {
    return broken("page " + std::to_string(page) + " (offset " +
                  std::to_string(page * snapshot_.page_size) + ") " + what);
  }

  // Calls visit(page, bytes) for the pages of a level, in order.
  template <typename Visit>
  std::optional<Error> each_page(const std::vector<Expected>& level, Visit&& visit) {
    const uint32_t size = snapshot_.page_size;
    std::vector<std::byte> bytes;
    std::vector<RangeRead> reads;
    for (size_t begin = 0; begin < level.size(); begin += kPagesAtOnce) {
      const size_t end = std::min(level.size(), begin + kPagesAtOnce);
      bytes.resize((end - begin) * size);
      reads.clear();
      for (size_t i = begin; i < end; ++i) {
        if (level[i].page > snapshot_.last_page || level[i].page < 2) {
          return broken("a page refers to page " + std::to_string(level[i].page) +
                        ", which the database does not have");
        }
        const auto into = std::span(bytes).subspan((i - begin) * size, size);
        // Neighbours in one read: a fresh database has long runs of them.
        if (!reads.empty() && level[i].page == level[i - 1].page + 1 &&
            reads.back().into.size() < kMostRun) {
          reads.back().into = {reads.back().into.data(), reads.back().into.size() + size};
          continue;
        }
        RangeRead r;
        r.offset = level[i].page * size;
        r.into = into;
        r.once = true;
        reads.push_back(std::move(r));
      }
      reader_.read(reads);
      for (const RangeRead& r : reads) {
        if (auto error = failed(r)) return error;
      }
      records_.pages_read += end - begin;
      for (size_t i = begin; i < end; ++i) {
        const Page page(std::span<const std::byte>(bytes).subspan((i - begin) * size, size));
        if (page.number() != level[i].page) {
          return broken_page(level[i].page,
                             "says that it is page " + std::to_string(page.number()));
        }
        if (auto error = visit(level[i], page)) return error;
      }
    }
    return {};
  }

  // From one level of branch pages to the next level.
  std::optional<Error> descend(std::vector<Expected>& level) {
    std::vector<Expected> below;
    for (const Expected& e : level) branch_page_.push_back(e.page);
    if (branch_page_.size() > tree_.branch_pages) {
      return broken("it has more branch pages than it says");
    }
    auto error = each_page(
        level, [&](const Expected& from, const Page& page) { return branch(from, page, below); });
    if (error) return error;
    level = std::move(below);
    return {};
  }

  std::optional<Error> branch(const Expected& from, const Page& page,
                              std::vector<Expected>& below) {
    const auto nodes = page.nodes();
    if ((page.flags() & (kBranch | kLeaf | kOverflow | kMeta)) != kBranch) {
      return broken_page(from.page, "should be a branch page");
    }
    if (!nodes || *nodes == 0) return broken_page(from.page, "has a damaged header");
    if (below.size() + *nodes > tree_.branch_pages + tree_.leaf_pages) {
      return broken("its branch pages refer to more pages than it has");
    }
    if (auto error = check_nodes(from.page, page, *nodes)) return error;
    for (unsigned i = 0; i < *nodes; ++i) {
      const auto node = page.node(i);
      // The first key of a branch page is not kept: its parent's is its least.
      std::string least = i == 0 ? from.least : std::string(node->key);
      if (i > 0 && !below.empty() && !(i == 1 && below.back().least.empty()) &&
          compare_keys(below.back().least, least, tree_.flags) >= 0) {
        return broken_page(from.page, "has keys out of order");
      }
      below.push_back({node->child, std::move(least)});
    }
    return {};
  }

  std::optional<Error> leaves(const std::vector<Expected>& level) {
    if (level.size() > tree_.leaf_pages) return broken("it has more leaf pages than it says");
    return each_page(level,
                     [&](const Expected& from, const Page& page) { return leaf(from, page); });
  }

  std::optional<Error> leaf(const Expected& from, const Page& page) {
    const auto nodes = page.nodes();
    if ((page.flags() & (kBranch | kLeaf | kOverflow | kMeta | kLeaf2)) != kLeaf) {
      return broken_page(from.page, "should be a leaf page");
    }
    if (!nodes) return broken_page(from.page, "has a damaged header");
    if (auto error = check_nodes(from.page, page, *nodes)) return error;
    records_.leaf_page.push_back(from.page);
    for (unsigned i = 0; i < *nodes; ++i) {
      const auto node = page.node(i);
      if ((entries_ > 0 && compare_keys(last_key_, node->key, tree_.flags) >= 0) ||
          (i == 0 && !from.least.empty() && compare_keys(from.least, node->key, tree_.flags) > 0)) {
        return broken_page(from.page, "has keys out of order");
      }
      last_key_ = node->key;
      ++entries_;
      if (node->flags & kDupData) {
        return Error(ErrorKind::usage, path() + " has several values for key \"" +
                                           source::printable(node->key) + "\", which is not read");
      }
      if (node->flags & kSubData) {
        // LMDB keeps it in the leaf, never on pages of its own.
        if (node->length != kTreeBytes || node->flags & kBigData) {
          return broken_page(from.page, "has a damaged description of a named database");
        }
        records_.databases.emplace_back(node->key);
        records_.database_trees.push_back(page.tree(node->data_at));
        continue;
      }
      if (auto error = value(from.page, page, *node)) return error;
    }
    return {};
  }

  // All nodes inside the page, and no byte in two of them: else a few pages could hold keys and
  // values of any total size.
  std::optional<Error> check_nodes(uint64_t number, const Page& page, unsigned nodes) {
    places_.clear();
    for (unsigned i = 0; i < nodes; ++i) {
      const auto node = page.node(i);
      if (!node) return broken_page(number, "has a node that is not inside it");
      places_.emplace_back(node->begin, node->end);
    }
    std::sort(places_.begin(), places_.end());
    for (size_t i = 1; i < places_.size(); ++i) {
      if (places_[i - 1].second > places_[i].first) {
        return broken_page(number, "has nodes that share bytes");
      }
    }
    return {};
  }

  std::optional<Error> value(uint64_t number, const Page& page, const Node& node) {
    uint64_t offset = number * snapshot_.page_size + node.data_at;
    const bool own = node.flags & kBigData;
    if (own) {
      const uint64_t first = page.word(node.data_at);
      const uint64_t pages = pages_of(node.length);
      if (first < 2 || first > snapshot_.last_page || pages > snapshot_.last_page + 1 - first) {
        return broken("the value of key \"" + source::printable(node.key) + "\" (" +
                      std::to_string(node.length) + " bytes at page " + std::to_string(first) +
                      ") does not end inside the database");
      }
      offset = first * snapshot_.page_size + kPageHeader;
    }
    records_.offset.push_back(offset);
    records_.length.push_back(node.length);
    records_.own_pages.push_back(own ? 1 : 0);
    records_.keys += node.key;
    records_.key_ends.push_back(records_.keys.size());
    return {};
  }

  uint64_t pages_of(uint64_t length) const {
    return (kPageHeader + length + snapshot_.page_size - 1) / snapshot_.page_size;
  }

  // No two values share a page of their own, and none lies on a page of the tree.
  std::optional<Error> check_overlaps() {
    std::vector<std::pair<uint64_t, uint64_t>> runs;  // first page, pages
    uint64_t own = 0;
    for (uint64_t i = 0; i < records_.size(); ++i) {
      if (!records_.own_pages[i]) continue;
      runs.emplace_back(records_.offset[i] / snapshot_.page_size, pages_of(records_.length[i]));
      own += runs.back().second;
    }
    for (const uint64_t page : records_.leaf_page) runs.emplace_back(page, 1);
    for (const uint64_t page : branch_page_) runs.emplace_back(page, 1);
    std::sort(runs.begin(), runs.end());
    for (size_t i = 1; i < runs.size(); ++i) {
      if (runs[i - 1].first + runs[i - 1].second > runs[i].first) {
        return broken_page(runs[i].first, "is used twice");
      }
    }
    // Fewer is sound: a large value that was replaced by a smaller one keeps its pages.
    if (own > tree_.overflow_pages) {
      return broken("its large values take " + std::to_string(own) + " pages and not " +
                    std::to_string(tree_.overflow_pages) + ": the length of one is wrong");
    }
    return {};
  }

  std::optional<Error> failed(const RangeRead& r) const {
    if (r.error == 0) return {};
    return Error(ErrorKind::io,
                 "cannot read page " + std::to_string(r.offset / snapshot_.page_size) + " of " +
                     path() + ": " + (r.why.empty() ? source::read_error_text(r.error) : r.why),
                 r.error);
  }

  static constexpr size_t kMostRun = 256 << 10;

  RangeReader& reader_;
  const Storage& storage_;
  const Snapshot snapshot_;
  const Tree tree_;
  Records records_;
  std::string last_key_;
  std::vector<uint64_t> branch_page_;
  std::vector<std::pair<size_t, size_t>> places_;  // of one page's nodes
  uint64_t entries_ = 0;
};

// The description of a named database.
Result<Tree> find_database(RangeReader& reader, const Storage& storage, const Snapshot& snapshot,
                           std::string_view name) {
  auto main = Scan(reader, storage, snapshot, snapshot.main).run();
  if (!main) return main.error();
  const Records& records = main.value();
  const auto found = std::find(records.databases.begin(), records.databases.end(), name);
  if (found == records.databases.end()) {
    std::string names;
    for (const std::string& d : records.databases) {
      names += (names.empty() ? "" : ", ") + source::printable(d);
    }
    return Error(ErrorKind::usage,
                 storage.files()[0].path + " has no database \"" + source::printable(name) + "\"" +
                     (names.empty() ? ", and no named one at all" : "; it has: " + names));
  }
  const Tree tree = records.database_trees[static_cast<size_t>(found - records.databases.begin())];
  if (tree.root == kNoPage
          ? tree.entries == 0
          : tree.root <= snapshot.last_page && tree.depth >= 1 && tree.depth <= kMaxDepth) {
    return tree;
  }
  return Error(ErrorKind::corruption, storage.files()[0].path +
                                          " is damaged: the description of "
                                          "database \"" +
                                          source::printable(name) + "\" cannot be");
}

// Damage that a writer explains is none: the file that was opened has become another one.
Error judged(const Storage& storage, const Error& error) {
  if (error.kind() != ErrorKind::corruption) return error;
  const std::string change = storage.changed(0);
  if (change.empty()) return error;
  return Error(ErrorKind::io, storage.files()[0].path + " is being written to (" + change +
                                  "): open it again when no process writes to it");
}

}  // namespace

Result<Records> scan(RangeReader& reader, const Storage& storage, std::string_view database) {
  for (int attempt = 0;; ++attempt) {
    auto snapshot = read_snapshot(reader, storage);
    if (!snapshot) return judged(storage, snapshot.error());
    Tree tree = snapshot.value().main;
    std::optional<Error> error;
    if (!database.empty()) {
      auto found = find_database(reader, storage, snapshot.value(), database);
      if (found) {
        tree = found.value();
      } else {
        error = found.error();
      }
    }
    std::optional<Records> records;
    if (!error) {
      auto result = Scan(reader, storage, snapshot.value(), tree).run();
      if (result) {
        records = std::move(result).take();
      } else {
        error = result.error();
      }
    }
    auto after = read_snapshot(reader, storage);
    if (!after) return judged(storage, after.error());
    // All of it: a meta page may have been caught half written.
    if (after.value() == snapshot.value()) {
      if (error) return judged(storage, *error);
      return std::move(*records);
    }
    if (attempt + 1 == kAttempts) {
      return Error(ErrorKind::io, storage.files()[0].path +
                                      " is being written to, faster than it can be examined: open "
                                      "it when no process writes to it");
    }
  }
}

std::string check_value_page(std::span<const std::byte> header, uint64_t page, uint64_t pages) {
  if (header.size() < kPageHeader) return {};
  const auto number = number_at<uint64_t>(header, 0);
  const auto flags = number_at<uint16_t>(header, 10);
  const auto count = number_at<uint32_t>(header, 12);
  if (number == page && (flags & (kBranch | kLeaf | kOverflow | kMeta)) == kOverflow &&
      count >= pages) {
    return {};
  }
  return "page " + std::to_string(page) + " does not start a value of " + std::to_string(pages) +
         " pages any more: the database is damaged, or was written to since it was indexed";
}

namespace {

std::string stamp_of(const Snapshot& s, const Tree& tree, std::string_view database) {
  return "database=" + std::string(database) + " page=" + std::to_string(s.page_size) +
         " transaction=" + std::to_string(s.transaction) + " last=" + std::to_string(s.last_page) +
         " root=" + std::to_string(tree.root) + " entries=" + std::to_string(tree.entries);
}

}  // namespace

std::string stamp(const Records& records, std::string_view database) {
  return stamp_of(records.snapshot, records.tree, database);
}

Result<std::string> current_stamp(RangeReader& reader, const Storage& storage,
                                  std::string_view database) {
  auto snapshot = read_snapshot(reader, storage);
  if (!snapshot) return judged(storage, snapshot.error());
  if (database.empty()) return stamp_of(snapshot.value(), snapshot.value().main, database);
  auto tree = find_database(reader, storage, snapshot.value(), database);
  if (!tree) return judged(storage, tree.error());
  return stamp_of(snapshot.value(), tree.value(), database);
}

std::vector<uint64_t> decimal_keys(const Records& records) {
  std::vector<uint64_t> numbers;
  numbers.reserve(records.size());
  for (uint64_t i = 0; i < records.size(); ++i) {
    const std::string_view key = records.key(i);
    uint64_t number = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), number);
    const bool decimal = error == std::errc() && end == key.data() + key.size();
    numbers.push_back(decimal ? number : kNoNumber);
  }
  return numbers;
}

}  // namespace nostall::records::lmdb
