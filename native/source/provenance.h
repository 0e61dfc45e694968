// source/provenance.h - places computed from how a database was written, instead of looked up.
//
// The strategy of LMDBIO-PROV [Pumma 2020, sec. 5.2.2]: six recorded facts and LMDB's way of
// adding pages give the place of every record. It holds for databases that one writer filled in key
// order without ever reusing a freed page; what breaks the rule (commits in between and values of
// one page, replaced or deleted records) is found by comparing every computed page with the tree,
// and refused with the reason, for a wrong place gives plausible bytes.
// Thread-safety: pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "source/lmdb.h"

namespace nostall::source::lmdb {

// The recorded facts, a few numbers per database; sizes are of values.
struct Provenance {
  uint64_t commit_every = 0;     // records per transaction; 0: one transaction
  uint64_t leaf_records = 0;     // records of a leaf page that is full
  uint64_t branch_children = 0;  // children of a branch page that is full
  bool appended = false;         // put with MDB_APPEND: leaves are filled to the end
  std::vector<uint64_t> sizes;   // bytes of every value, in the order they were added
};

// The facts that the finished database itself tells (its "one-time postprocessing").
Provenance derive(const Records& records);

// First page of every value, in the order of `provenance.sizes`.
std::vector<uint64_t> compute_pages(const Provenance& provenance, uint32_t page_size);

// Why the computed places are not those of the tree, or an empty string.
std::string verify(const Records& records, std::span<const uint64_t> pages);

}  // namespace nostall::source::lmdb
