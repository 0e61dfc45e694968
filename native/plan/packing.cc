// Packing by counts. Documents of one length are alike, so best fit plans lengths: units with the
// same contents form a group, and all documents of a length go into a group at once. There are at
// most a few groups for each length, whatever the number of documents. The documents themselves
// are dealt to the groups afterwards, from a counting sort by length in a seeded order.
#include "plan/packing.h"

#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/crc32c.h"
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

// The beginning of a block. Tables follow: begins, filled, pieces, each with room for as many as
// there can be; memory that is not written to takes none.
struct Head {
  uint64_t magic = kPackBlock;
  uint64_t units = 0, pieces = 0, tokens = 0;
  uint64_t most_units = 0, most_pieces = 0;
  uint32_t capacity = 0, longer = 0;
  uint32_t checksum = 0, version = kPackingVersion;

  uint64_t begins_at() const noexcept { return sizeof(Head); }
  uint64_t filled_at() const noexcept { return begins_at() + 8 * (most_units + 1); }
  uint64_t pieces_at() const noexcept { return filled_at() + sizeof(Units::Filled) * most_units; }
  uint64_t bytes() const noexcept { return pieces_at() + sizeof(Piece) * most_pieces; }
};

template <typename T>
T* table(const SealedMemory& block, uint64_t at) noexcept {
  return reinterpret_cast<T*>(block.data() + at);
}

uint32_t checksum_of(const Units& units) noexcept {
  uint32_t sum = crc32c(std::as_bytes(units.begins));
  sum = crc32c(std::as_bytes(units.contents), sum);
  return crc32c(std::as_bytes(units.pieces), sum);
}

// Writes units one after the other.
class Writer {
 public:
  Writer(const SealedMemory& block, const Head& head)
      : begins_(table<uint64_t>(block, head.begins_at())),
        filled_(table<Units::Filled>(block, head.filled_at())),
        pieces_(table<Piece>(block, head.pieces_at())) {}

  // `open`: the document goes on behind its `length` tokens.
  void piece(uint32_t document, uint32_t begin, uint32_t length, bool open) noexcept {
    pieces_[written_++] = {document, begin};
    unit_.tokens += length;
    unit_.open += open ? 1 : 0;
  }
  void end_unit() noexcept {
    filled_[units_++] = unit_;
    begins_[units_] = written_;
    unit_ = {};
  }
  uint32_t filled() const noexcept { return unit_.tokens; }
  uint64_t units() const noexcept { return units_; }
  uint64_t pieces() const noexcept { return written_; }

 private:
  uint64_t* begins_;
  Units::Filled* filled_;
  Piece* pieces_;
  Units::Filled unit_;
  uint64_t units_ = 0, written_ = 0;
};

void concatenate(std::span<const uint32_t> lengths, const PackSpec& spec, Writer& out) {
  in_seeded_order(lengths, spec.seed, [&](uint32_t document) {
    const uint32_t length = lengths[document];
    const uint32_t end =
        spec.longer == LongDocuments::cut ? std::min(length, spec.capacity) : length;
    for (uint32_t begin = 0; begin < end;) {
      const uint32_t taken = std::min(end - begin, spec.capacity - out.filled());
      out.piece(document, begin, taken, begin + taken < length);
      begin += taken;
      if (out.filled() == spec.capacity) out.end_unit();
    }
  });
  if (out.filled() > 0) out.end_unit();
}

// Units that one document fills alone.
void fill_alone(std::span<const uint32_t> lengths, const PackSpec& spec, Writer& out) {
  for (size_t document = 0; document < lengths.size(); ++document) {
    const uint32_t length = lengths[document];
    if (length <= spec.capacity) continue;
    for (uint32_t i = 0; i < length / spec.capacity; ++i) {
      const uint32_t begin = i * spec.capacity;
      out.piece(static_cast<uint32_t>(document), begin, spec.capacity,
                length - begin > spec.capacity);
      out.end_unit();
    }
  }
}

void fit(std::span<const uint32_t> lengths, const PackSpec& spec, bool splits, Writer& out) {
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
        const bool cut = spec.longer == LongDocuments::cut && link.length == spec.capacity;
        for (uint32_t i = 0; i < link.times; ++i) {
          const uint32_t document = sorted[next[link.length]++];
          const uint32_t begin = splits ? lengths[document] - link.length : 0;
          out.piece(document, begin, link.length, cut && lengths[document] > link.length);
        }
      }
      out.end_unit();
    }
  });
}

void fail(const std::string& what) { throw Error(ErrorKind::usage, what); }

Units view(const SealedMemory& block, const Head& head) {
  Units units;
  units.capacity = head.capacity;
  units.longer = static_cast<LongDocuments>(head.longer);
  units.checksum = head.checksum;
  units.tokens = head.tokens;
  units.begins = {table<uint64_t>(block, head.begins_at()), head.units + 1};
  units.contents = {table<Units::Filled>(block, head.filled_at()), head.units};
  units.pieces = {table<Piece>(block, head.pieces_at()), head.pieces};
  return units;
}

// What is known before anything is packed.
struct Sums {
  uint64_t tokens = 0;
  uint64_t documents = 0, alone = 0;  // documents with tokens, and units that one fills alone
  bool splits = false;
};

Sums sums_of(std::span<const uint32_t> lengths, const PackSpec& spec) {
  Sums sums;
  for (size_t document = 0; document < lengths.size(); ++document) {
    const uint32_t length = lengths[document];
    sums.documents += length > 0;
    sums.tokens += length;
    if (length <= spec.capacity) continue;
    if (spec.longer == LongDocuments::refuse) {
      fail("document " + std::to_string(document) + " has " + std::to_string(length) +
           " tokens, more than the " + std::to_string(spec.capacity) +
           " of a unit: split or cut long documents, or make units longer");
    }
    if (spec.longer == LongDocuments::cut) {
      sums.tokens -= length - spec.capacity;
    } else {
      sums.splits = true;
      sums.alone += length / spec.capacity;
    }
  }
  return sums;
}

}  // namespace

std::unique_ptr<SealedMemory> pack_block(std::span<const uint32_t> lengths, const PackSpec& spec,
                                         BlockFor use) {
  if (spec.capacity == 0 || spec.capacity > kMostCapacity) {
    fail("units have room for 1 to " + std::to_string(kMostCapacity) + " tokens, not " +
         std::to_string(spec.capacity));
  }
  if (lengths.size() >= KeyedPermutation::kFillBelow) {
    fail(std::to_string(lengths.size()) + " documents are more than are packed together: at most " +
         std::to_string(KeyedPermutation::kFillBelow - 1) + ". Pack parts of the data set");
  }
  const Sums sums = sums_of(lengths, spec);
  Head head;
  head.capacity = spec.capacity;
  head.longer = static_cast<uint32_t>(spec.longer);
  head.tokens = sums.tokens;
  head.most_pieces = sums.documents + sums.alone + sums.tokens / spec.capacity;
  head.most_units = std::min(sums.tokens, sums.documents + sums.alone) + 1;
  auto block = use == BlockFor::others
                   ? std::make_unique<SealedMemory>("nostall-packing", head.bytes())
                   : std::make_unique<SealedMemory>(head.bytes());
  Writer out(*block, head);
  if (spec.packing == Packing::concatenate) {
    concatenate(lengths, spec, out);
  } else {
    if (sums.splits) fill_alone(lengths, spec, out);
    fit(lengths, spec, sums.splits, out);
  }
  head.units = out.units();
  head.pieces = out.pieces();
  std::memcpy(block->data(), &head, sizeof head);
  head.checksum = checksum_of(view(*block, head));
  std::memcpy(block->data(), &head, sizeof head);
  return block;
}

Units Units::of(std::shared_ptr<const SealedMemory> block) {
  Head head;
  const Head expected;
  if (block->size() >= sizeof head) std::memcpy(&head, block->data(), sizeof head);
  // Numbers of units and pieces are compared first: sums of them must not wrap around.
  const uint64_t most = block->size();
  const bool sound = block->size() >= sizeof head && head.magic == expected.magic &&
                     head.version == expected.version && head.most_units < most &&
                     head.most_pieces < most && head.units <= head.most_units &&
                     head.pieces <= head.most_pieces && head.bytes() <= block->size();
  if (sound) {
    Units units = view(*block, head);
    if (checksum_of(units) == head.checksum) {
      units.block = std::move(block);
      return units;
    }
  }
  throw Error(ErrorKind::corruption, "what another process shares is no packing of documents");
}

Units pack(std::span<const uint32_t> lengths, const PackSpec& spec) {
  return Units::of(pack_block(lengths, spec, BlockFor::this_process));
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
