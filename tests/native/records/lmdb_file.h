// A writer of small LMDB files (data version 1), page by page, for tests: every field can be bent
// afterwards. Keys must be added in order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "records/lmdb.h"

namespace nostall::records::lmdb {

struct Entry {
  std::string key, value;
  uint16_t node_flags = 0;
  uint64_t spare_pages = 0;  // of the value's own pages: LMDB keeps them when a value shrinks
};

class LmdbFile {
 public:
  explicit LmdbFile(uint32_t page_size = 4096) : page_size_(page_size) { pages(2); }

  // Leaves and branches take at most so many nodes, so that few records make a deep tree.
  Tree add_tree(const std::vector<Entry>& entries, size_t most_records = 1000,
                size_t most_children = 1000, uint16_t flags = 0) {
    Tree t;
    t.flags = flags;
    t.entries = entries.size();
    t.root = kNoPage;
    if (entries.empty()) return t;
    std::vector<Child> level;
    for (size_t i = 0; i < entries.size();) level.push_back(leaf(t, entries, i, most_records));
    t.leaf_pages = level.size();
    t.depth = 1;
    while (level.size() > 1) {
      std::vector<Child> above;
      for (size_t i = 0; i < level.size();) above.push_back(branch(level, i, most_children));
      t.branch_pages += above.size();
      ++t.depth;
      level = std::move(above);
    }
    t.root = level[0].page;
    return t;
  }

  // The value of a named database's record.
  static std::string description(const Tree& t) {
    std::string s(48, '\0');
    store(s, 4, t.flags, 2);
    store(s, 6, t.depth, 2);
    store(s, 8, t.branch_pages, 8);
    store(s, 16, t.leaf_pages, 8);
    store(s, 24, t.overflow_pages, 8);
    store(s, 32, t.entries, 8);
    store(s, 40, t.root, 8);
    return s;
  }

  // Writes meta page `which` for `main`, as transaction number `transaction` committed it.
  void meta(unsigned which, const Tree& main, uint64_t transaction) {
    const size_t at = size_t{which} * page_size_;
    store(bytes, at, which, 8);
    store(bytes, at + 10, 8, 2);
    store(bytes, at + 16, 0xBEEFC0DE, 4);
    store(bytes, at + 20, 1, 4);
    store(bytes, at + 32, uint64_t{1} << 30, 8);
    Tree free;
    free.flags = 8;
    free.root = kNoPage;
    bytes.replace(at + 40, 48, description(free));
    store(bytes, at + 40, page_size_, 4);
    bytes.replace(at + 88, 48, description(main));
    store(bytes, at + 136, bytes.size() / page_size_ - 1, 8);
    store(bytes, at + 144, transaction, 8);
  }
  // Both meta pages, the second one the newer.
  void commit(const Tree& main, uint64_t transaction = 7) {
    Tree empty;
    empty.root = kNoPage;
    meta(0, transaction > 1 ? main : empty, transaction - 1);
    meta(1, main, transaction);
  }

  // Where node i of a page starts.
  size_t node_at(uint64_t page, size_t i) const {
    const size_t at = page * page_size_;
    return at + load(at + 16 + 2 * i, 2);
  }
  uint64_t load(size_t at, size_t size) const {
    uint64_t v = 0;
    for (size_t i = 0; i < size; ++i) v |= uint64_t{uint8_t(bytes[at + i])} << (8 * i);
    return v;
  }
  void put(size_t at, uint64_t value, size_t size) { store(bytes, at, value, size); }

  static void store(std::string& s, size_t at, uint64_t value, size_t size) {
    for (size_t i = 0; i < size; ++i) s.at(at + i) = static_cast<char>(value >> (8 * i));
  }

  std::string bytes;
  std::vector<uint64_t> leaf_pages, branch_pages, value_pages;

 private:
  struct Child {
    uint64_t page = 0;
    std::string key;
  };
  struct Packed {
    std::string key, data;
    uint16_t low = 0, high = 0, flags = 0;
  };

  uint64_t pages(uint64_t n) {
    const uint64_t first = bytes.size() / page_size_;
    bytes.resize(bytes.size() + n * page_size_);
    return first;
  }
  static size_t node_size(const Packed& n) {
    return (8 + n.key.size() + n.data.size() + 1) / 2 * 2;
  }

  // Nodes from the end of the page downwards, their offsets from its start upwards.
  void fill(uint64_t page, uint16_t flags, const std::vector<Packed>& nodes) {
    const size_t at = page * page_size_;
    size_t upper = page_size_;
    for (size_t i = 0; i < nodes.size(); ++i) {
      upper -= node_size(nodes[i]);
      store(bytes, at + 16 + 2 * i, upper, 2);
      const Packed& n = nodes[i];
      store(bytes, at + upper, n.low, 2);
      store(bytes, at + upper + 2, n.high, 2);
      store(bytes, at + upper + 4, n.flags, 2);
      store(bytes, at + upper + 6, n.key.size(), 2);
      bytes.replace(at + upper + 8, n.key.size(), n.key);
      bytes.replace(at + upper + 8 + n.key.size(), n.data.size(), n.data);
    }
    store(bytes, at, page, 8);
    store(bytes, at + 10, flags, 2);
    store(bytes, at + 12, 16 + 2 * nodes.size(), 2);
    store(bytes, at + 14, upper, 2);
  }

  Child leaf(Tree& t, const std::vector<Entry>& entries, size_t& next, size_t most) {
    const uint64_t page = pages(1);
    leaf_pages.push_back(page);
    Child child{page, entries[next].key};
    std::vector<Packed> nodes;
    size_t used = 16;
    for (; next < entries.size() && nodes.size() < most; ++next) {
      const Entry& e = entries[next];
      const size_t most_inside = (page_size_ - 16) / 2 / 2 * 2 - 2;
      const bool own = e.spare_pages > 0 || 8 + e.key.size() + e.value.size() > most_inside;
      Packed n{e.key, own ? std::string(8, '\0') : e.value, 0, 0, e.node_flags};
      if (used + node_size(n) + 2 > page_size_) break;
      used += node_size(n) + 2;
      n.low = static_cast<uint16_t>(e.value.size());
      n.high = static_cast<uint16_t>(e.value.size() >> 16);
      if (own) {
        n.flags |= 1;
        store(n.data, 0, value_pages_of(t, e), 8);
      }
      nodes.push_back(std::move(n));
    }
    fill(page, 2, nodes);
    return child;
  }

  uint64_t value_pages_of(Tree& t, const Entry& e) {
    const uint64_t n = (16 + e.value.size() + page_size_ - 1) / page_size_ + e.spare_pages;
    const uint64_t first = pages(n);
    value_pages.push_back(first);
    const size_t at = first * page_size_;
    store(bytes, at, first, 8);
    store(bytes, at + 10, 4, 2);
    store(bytes, at + 12, n, 4);
    bytes.replace(at + 16, e.value.size(), e.value);
    t.overflow_pages += n;
    return first;
  }

  Child branch(const std::vector<Child>& level, size_t& next, size_t most) {
    const uint64_t page = pages(1);
    branch_pages.push_back(page);
    Child child{page, level[next].key};
    std::vector<Packed> nodes;
    size_t used = 16;
    for (; next < level.size() && nodes.size() < most; ++next) {
      const Child& c = level[next];
      Packed n{nodes.empty() ? std::string() : c.key, {}, 0, 0, 0};
      if (used + node_size(n) + 2 > page_size_) break;
      used += node_size(n) + 2;
      n.low = static_cast<uint16_t>(c.page);
      n.high = static_cast<uint16_t>(c.page >> 16);
      n.flags = static_cast<uint16_t>(c.page >> 32);
      nodes.push_back(std::move(n));
    }
    fill(page, 1, nodes);
    return child;
  }

  uint32_t page_size_;
};

}  // namespace nostall::records::lmdb
