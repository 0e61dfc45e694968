// plan/packing.h - documents packed into units of one length, before the run.
//
// A unit is what training consumes at one place of a batch: a list of pieces of documents. Lengths
// of all documents are known, so packing is a decision over the whole data set, a pure function of
// (lengths, PackSpec): the same units on every rank and every machine (docs/formats/units.md).
// Best fit costs one pass to count lengths and one to write; it counts rooms of units and searches
// none. Memory beside the result: 4 bytes a document. The result is one block without addresses, of
// which a node needs one copy. Thread-safety: values and pure functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>

#include "base/sealed.h"

namespace nostall::plan {

// Tokens of a unit, at most.
inline constexpr uint32_t kMostCapacity = 1u << 24;

// The version of the algorithms below; part of the fingerprint of a packing.
inline constexpr uint32_t kPackingVersion = 1;
// What a block begins with: its layout.
inline constexpr uint64_t kPackBlock = 0x314b43415054534e;  // "NSTPACK1"

enum class Packing : uint8_t {
  // Documents end to end in a seeded order, cut every `capacity` tokens.
  concatenate,
  // Best-fit decreasing over all documents: the longest first, each into the unit with the least
  // room that takes it. Documents no longer than a unit stay whole.
  best_fit,
};

// What happens to documents longer than a unit.
enum class LongDocuments : uint8_t {
  split,   // units of their own, and a rest that is packed
  cut,     // to the length of a unit; the other tokens are not used
  refuse,  // Error(usage)
};

struct PackSpec {
  uint32_t capacity = 0;  // tokens of a unit
  Packing packing = Packing::best_fit;
  LongDocuments longer = LongDocuments::split;
  uint64_t seed = 0;  // which documents of a length come first; the order of `concatenate`
};

// Its length follows from that of its document: Units::length_of.
struct Piece {
  uint32_t document = 0;
  uint32_t begin = 0;  // its first token in the document
  bool operator==(const Piece&) const = default;
};

struct Units {
  // What is in a unit.
  struct Filled {
    uint32_t tokens = 0;
    uint32_t open = 0;  // pieces that end before their document does
    bool operator==(const Filled&) const = default;
  };
  // The block of such units. Throws Error(corruption) if it is none.
  static Units of(std::shared_ptr<const SealedMemory> block);
  // Whether these can be units of these documents: each piece lies in its document, and units have
  // what `contents` says. For a block of another process; one pass. `Lengths` has size(), length(d)
  // and prefetch(d).
  template <typename Lengths>
  bool are_of(const Lengths& documents, const PackSpec& spec) const;

  uint32_t capacity = 0;
  LongDocuments longer = LongDocuments::split;
  uint32_t checksum = 0;             // of the three tables
  uint64_t tokens = 0;               // of all pieces
  std::span<const uint64_t> begins;  // unit u has the pieces [begins[u], begins[u + 1])
  std::span<const Filled> contents;  // of each unit
  std::span<const Piece> pieces;
  std::shared_ptr<const SealedMemory> block;  // where the tables lie

  uint64_t size() const noexcept { return contents.size(); }
  std::span<const Piece> operator[](uint64_t unit) const noexcept {
    return pieces.subspan(begins[unit], begins[unit + 1] - begins[unit]);
  }
  // Tokens of a piece: of a document with `length` tokens, after `filled` tokens of its unit.
  uint32_t length_of(Piece piece, uint32_t length, uint32_t filled) const noexcept {
    if (longer == LongDocuments::cut) length = std::min(length, capacity);
    return std::min(length - piece.begin, capacity - filled);
  }
  // The share of positions that no token takes.
  double waste() const noexcept {
    const double positions = static_cast<double>(size()) * capacity;
    return positions > 0 ? 1.0 - static_cast<double>(tokens) / positions : 0.0;
  }
};

template <typename Lengths>
bool Units::are_of(const Lengths& documents, const PackSpec& spec) const {
  if (capacity != spec.capacity || longer != spec.longer) return false;
  if (begins.front() != 0 || begins.back() != pieces.size()) return false;
  uint64_t all = 0;
  for (uint64_t u = 0; u < size(); ++u) {
    if (begins[u + 1] < begins[u] || begins[u + 1] > pieces.size()) return false;
    // They lie anywhere: their misses overlap.
    for (const Piece& piece : (*this)[u]) documents.prefetch(piece.document);
    Filled found;
    for (const Piece& piece : (*this)[u]) {
      if (piece.document >= documents.size()) return false;
      const uint32_t length = documents.length(piece.document);
      if (piece.begin >= (longer == LongDocuments::cut ? std::min(length, capacity) : length)) {
        return false;
      }
      const uint32_t taken = length_of(piece, length, found.tokens);
      if (taken == 0) return false;
      found.tokens += taken;
      found.open += piece.begin + taken < length ? 1 : 0;
    }
    if (found != contents[u]) return false;
    all += found.tokens;
  }
  return all == tokens;
}

// Empty documents are in no unit. Throws Error(usage) for a capacity of 0 or beyond kMostCapacity, 2^31
// documents or more, and for a long document that is to be refused, by its number and length.
// The block: to be sealed for others, or of this process alone.
enum class BlockFor : uint8_t { others, this_process };
std::unique_ptr<SealedMemory> pack_block(std::span<const uint32_t> lengths, const PackSpec& spec,
                                         BlockFor use = BlockFor::others);
Units pack(std::span<const uint32_t> lengths, const PackSpec& spec);

// 64-bit hash of everything beside the lengths that decides the units.
uint64_t fingerprint(const PackSpec& spec) noexcept;

}  // namespace nostall::plan
