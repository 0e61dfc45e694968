// Packing by counts. Documents of one length are alike, so best fit plans lengths: units with the
// same contents form a group, and all documents of a length go into a group at once. There are at
// most a few groups for each length, whatever the number of documents. The documents themselves
// are dealt to the groups afterwards, from a counting sort by length in a seeded order.
#include "plan/packing.h"

#include <bit>
#include <limits>
#include <string>

#include "base/error.h"
#include "base/fnv.h"
#include "plan/permutation.h"

namespace nostall::plan {
namespace {

constexpr uint64_t kBlock = 4096;  // documents at a time, to overlap the misses of their lengths

// Calls f(document) for all documents in the seeded order, with their lengths on the way to the
// cache.
template <typename F>
void in_seeded_order(std::span<const uint32_t> lengths, uint64_t seed, F&& f) {
  if (lengths.empty()) return;
  const KeyedPermutation order(lengths.size(), seed, 0);
  std::vector<uint32_t> block(kBlock);
  for (uint64_t begin = 0; begin < lengths.size(); begin += kBlock) {
    block.resize(std::min<uint64_t>(kBlock, lengths.size() - begin));
    order.fill(block, begin);
    for (const uint32_t document : block) __builtin_prefetch(&lengths[document]);
    for (const uint32_t document : block) f(document);
  }
}

// What is packed of a document, beside units that it fills alone.
uint32_t rest_of(uint32_t length, const PackSpec& spec) {
  if (length <= spec.capacity) return length;
  return spec.longer == LongDocuments::cut ? spec.capacity : length % spec.capacity;
}

// The units of best fit by the lengths of their pieces.
class Rooms {
 public:
  // `times` pieces of `length`, after those of the link `before`.
  struct Link {
    uint32_t before = 0, length = 0;
    uint32_t times = 0;
  };
  struct Group {
    uint32_t last = 0;  // a link; 0: no piece
    uint64_t units = 0;
  };

  // `counts[l]` pieces of length l.
  explicit Rooms(const std::vector<uint64_t>& counts)
      : capacity_(static_cast<uint32_t>(counts.size() - 1)),
        groups_(counts.size()),
        filled_(counts.size() / 64 + 1) {
    for (uint32_t length = capacity_; length > 0; --length) add(length, counts[length]);
  }

  // f(contents, units) of every group; contents are links in the order of the pieces.
  template <typename F>
  void each(F&& f) const {
    std::vector<Link> contents;
    for (const std::vector<Group>& groups : groups_) {
      for (const Group& group : groups) {
        contents.clear();
        for (uint32_t at = group.last; at != 0; at = links_[at].before) {
          contents.push_back(links_[at]);
        }
        std::reverse(contents.begin(), contents.end());
        f(contents, group.units);
      }
    }
  }

 private:
  void add(uint32_t length, uint64_t pieces) {
    while (pieces > 0) {
      uint32_t room = least_room(length);
      Group group{0, std::numeric_limits<uint64_t>::max()};
      const bool fresh = room > capacity_;
      if (fresh) {
        room = capacity_;
      } else {
        group = take(room);
      }
      // One unit takes pieces of this length until it has no room for another.
      const uint64_t each = std::min<uint64_t>(room / length, pieces);
      const uint64_t units = std::min(group.units, pieces / each);
      put(room - static_cast<uint32_t>(each) * length, group.last, length, each, units);
      pieces -= each * units;
      group.units -= units;
      if (pieces > 0 && pieces < each && group.units > 0) {
        put(room - static_cast<uint32_t>(pieces) * length, group.last, length, pieces, 1);
        pieces = 0;
        --group.units;
      }
      if (!fresh && group.units > 0) keep(room, group);
    }
  }
  void put(uint32_t room, uint32_t before, uint32_t length, uint64_t times, uint64_t units) {
    links_.push_back({before, length, static_cast<uint32_t>(times)});
    keep(room, {static_cast<uint32_t>(links_.size() - 1), units});
  }
  void keep(uint32_t room, Group group) {
    groups_[room].push_back(group);
    filled_[room / 64] |= uint64_t{1} << room % 64;
  }
  Group take(uint32_t room) {
    const Group group = groups_[room].back();
    groups_[room].pop_back();
    if (groups_[room].empty()) filled_[room / 64] &= ~(uint64_t{1} << room % 64);
    return group;
  }
  // The least room of a unit, at least `least`; more than the capacity if there is none.
  uint32_t least_room(uint32_t least) const {
    uint64_t bits = filled_[least / 64] & (~uint64_t{0} << least % 64);
    for (size_t word = least / 64;;) {
      if (bits != 0) return static_cast<uint32_t>(word * 64) + std::countr_zero(bits);
      if (++word == filled_.size()) return capacity_ + 1;
      bits = filled_[word];
    }
  }

  uint32_t capacity_;
  std::vector<Link> links_{1};
  std::vector<std::vector<Group>> groups_;  // by their room
  std::vector<uint64_t> filled_;            // a bit for each room that has groups
};

void concatenate(std::span<const uint32_t> lengths, const PackSpec& spec, Units& units) {
  uint32_t filled = 0;
  in_seeded_order(lengths, spec.seed, [&](uint32_t document) {
    const uint32_t end = spec.longer == LongDocuments::cut
                             ? std::min(lengths[document], spec.capacity)
                             : lengths[document];
    for (uint32_t begin = 0; begin < end;) {
      const uint32_t taken = std::min(end - begin, spec.capacity - filled);
      units.pieces.push_back({document, begin});
      begin += taken;
      filled += taken;
      if (filled == spec.capacity) {
        units.begins.push_back(units.pieces.size());
        filled = 0;
      }
    }
  });
  if (filled > 0) units.begins.push_back(units.pieces.size());
}

void fit(std::span<const uint32_t> lengths, const PackSpec& spec, bool splits, Units& units) {
  std::vector<uint64_t> counts(uint64_t{spec.capacity} + 1);
  for (const uint32_t length : lengths) ++counts[rest_of(length, spec)];
  counts[0] = 0;
  // Where the documents of each length begin among the sorted ones; then the next one to deal.
  std::vector<uint64_t> next(counts.size());
  for (size_t length = 1; length < counts.size(); ++length) {
    next[length] = next[length - 1] + counts[length - 1];
  }
  const std::vector<uint64_t> begins = next;
  std::vector<uint32_t> sorted(next.back() + counts.back());
  in_seeded_order(lengths, spec.seed, [&](uint32_t document) {
    const uint32_t rest = rest_of(lengths[document], spec);
    if (rest > 0) sorted[next[rest]++] = document;
  });
  next = begins;
  Rooms(counts).each([&](const std::vector<Rooms::Link>& contents, uint64_t count) {
    for (uint64_t unit = 0; unit < count; ++unit) {
      for (const Rooms::Link& link : contents) {
        for (uint32_t i = 0; i < link.times; ++i) {
          const uint32_t document = sorted[next[link.length]++];
          units.pieces.push_back({document, splits ? lengths[document] - link.length : 0});
        }
      }
      units.begins.push_back(units.pieces.size());
    }
  });
}

void fail(const std::string& what) { throw Error(ErrorKind::usage, what); }

}  // namespace

Units pack(std::span<const uint32_t> lengths, const PackSpec& spec) {
  if (spec.capacity == 0 || spec.capacity > kMostCapacity) {
    fail("units have room for 1 to " + std::to_string(kMostCapacity) + " tokens, not " +
         std::to_string(spec.capacity));
  }
  if (lengths.size() >= KeyedPermutation::kFillBelow) {
    fail(std::to_string(lengths.size()) + " documents are more than are packed together: at most " +
         std::to_string(KeyedPermutation::kFillBelow - 1) + ". Pack parts of the data set");
  }
  Units units{spec.capacity, spec.longer, 0, {0}, {}};
  uint64_t documents = 0, filled = 0;  // documents with tokens, and units that one fills alone
  bool splits = false;
  for (size_t document = 0; document < lengths.size(); ++document) {
    const uint32_t length = lengths[document];
    documents += length > 0;
    units.tokens += length;
    if (length <= spec.capacity) continue;
    if (spec.longer == LongDocuments::refuse) {
      fail("document " + std::to_string(document) + " has " + std::to_string(length) +
           " tokens, more than the " + std::to_string(spec.capacity) +
           " of a unit: split or cut long documents, or make units longer");
    }
    if (spec.longer == LongDocuments::cut) {
      units.tokens -= length - spec.capacity;
    } else {
      splits = true;
      filled += length / spec.capacity;
    }
  }
  // Address space that is not written to takes no memory.
  units.pieces.reserve(documents + filled + units.tokens / spec.capacity);
  units.begins.reserve(std::min(units.tokens, documents + filled) + 2);
  if (spec.packing == Packing::concatenate) {
    concatenate(lengths, spec, units);
    return units;
  }
  for (size_t document = 0; splits && document < lengths.size(); ++document) {
    if (lengths[document] <= spec.capacity) continue;
    for (uint32_t i = 0; i < lengths[document] / spec.capacity; ++i) {
      units.pieces.push_back({static_cast<uint32_t>(document), i * spec.capacity});
      units.begins.push_back(units.pieces.size());
    }
  }
  fit(lengths, spec, splits, units);
  return units;
}

uint64_t fingerprint(const PackSpec& spec) noexcept {
  return Fnv()
      .number(kPackingVersion)
      .number(spec.capacity)
      .number(static_cast<uint64_t>(spec.packing))
      .number(static_cast<uint64_t>(spec.longer))
      .number(spec.seed)
      .value();
}

}  // namespace nostall::plan
