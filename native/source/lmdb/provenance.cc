// Replays how liblmdb assigns pages while records are added in key order. Edge models the right
// edge of the B+ tree: adding a record takes the next pages of the file for its value, and for a
// new leaf, branch page or root when one is full. A commit copies the pages on the way to the last
// leaf.
#include "source/provenance.h"

#include <algorithm>
#include <array>

namespace nostall::source::lmdb {
namespace {

// The right edge of the tree while records are added in key order: how many records or children
// the last page of each level has, and the next page that was never used.
class Edge {
 public:
  Edge(const Provenance& p) : provenance_(p) {
    // A plain put splits a full leaf so that its last record moves along with the new one; one that
    // appends leaves full pages as they are. Branch pages are always split the first way.
    leaf_capacity_ = p.leaf_records + (p.appended ? 0 : 1);
    leaf_keeps_ = p.appended ? 0 : 1;
  }

  // Adds a record; the first of its `pages` pages.
  uint64_t add(uint64_t record, uint64_t pages) {
    if (record == 0) {
      ++next_;  // the root, a leaf
    } else if (provenance_.commit_every > 0 && record % provenance_.commit_every == 0) {
      next_ += 1 + levels_;  // a new transaction copies the way to the last leaf
    }
    if (provenance_.leaf_records > 0 && in_leaf_ == leaf_capacity_) {
      ++next_;
      if (levels_ == 0) new_root();
      in_leaf_ = leaf_keeps_;
      insert_child(0);
    }
    ++in_leaf_;
    const uint64_t page = next_;
    next_ += pages;
    return page;
  }

 private:
  void new_root() {
    ++next_;
    children_.at(levels_++) = 1;
  }
  void insert_child(size_t level) {
    if (provenance_.branch_children > 0 && children_[level] == provenance_.branch_children + 1) {
      ++next_;
      if (level + 1 == levels_) new_root();
      children_[level] = 1;
      insert_child(level + 1);
    }
    ++children_[level];
  }

  const Provenance& provenance_;
  uint64_t leaf_capacity_ = 0, leaf_keeps_ = 0;
  uint64_t next_ = 2;  // after the meta pages
  uint64_t in_leaf_ = 0;
  std::array<uint64_t, 64> children_{};  // of the last branch page of each level, lowest first
  size_t levels_ = 0;
};

uint64_t pages_of(uint64_t size, uint32_t page_size) {
  return (kPageHeader + size + page_size - 1) / page_size;
}

}  // namespace

Provenance derive(const Records& records) {
  Provenance p;
  p.sizes = records.length;
  p.branch_children = records.first_branch_children;
  if (records.leaf_first.size() > 1) {
    p.leaf_records = records.leaf_first[1];
    const uint64_t first = records.leaf_first[1];
    if (first < records.size()) {
      // Where nothing moved to the new leaf, its first value came after the leaf.
      p.appended = records.offset[first] / records.snapshot.page_size > records.leaf_page[1];
    }
  }
  return p;
}

std::vector<uint64_t> compute_pages(const Provenance& provenance, uint32_t page_size) {
  std::vector<uint64_t> pages;
  pages.reserve(provenance.sizes.size());
  Edge edge(provenance);
  for (uint64_t i = 0; i < provenance.sizes.size(); ++i) {
    pages.push_back(edge.add(i, pages_of(provenance.sizes[i], page_size)));
  }
  return pages;
}

std::string verify(const Records& records, std::span<const uint64_t> pages) {
  const uint32_t size = records.snapshot.page_size;
  const auto small = std::find(records.own_pages.begin(), records.own_pages.end(), 0);
  if (small != records.own_pages.end()) {
    return "record " + std::to_string(small - records.own_pages.begin()) + " (" +
           std::to_string(records.length[static_cast<size_t>(small - records.own_pages.begin())]) +
           " bytes) lies among the keys, not on pages of its own, where no rule of sizes finds it";
  }
  if (pages.size() != records.size()) {
    return "there are " + std::to_string(pages.size()) + " computed places for " +
           std::to_string(records.size()) + " records";
  }
  uint64_t right = 0, first_wrong = records.size();
  for (uint64_t i = 0; i < records.size(); ++i) {
    if (records.offset[i] == pages[i] * size + kPageHeader) {
      ++right;
    } else {
      first_wrong = std::min(first_wrong, i);
    }
  }
  if (right == records.size()) return {};
  return "the rule gives the right place for " + std::to_string(right) + " of " +
         std::to_string(records.size()) + " records only, and the first wrong one is record " +
         std::to_string(first_wrong) + " (key \"" + printable(records.key(first_wrong)) +
         "\": page " + std::to_string(records.offset[first_wrong] / size) + ", not " +
         std::to_string(pages[first_wrong]) +
         "): pages that earlier transactions freed were used again, or records came in another "
         "order";
}

}  // namespace nostall::source::lmdb
