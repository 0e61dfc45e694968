// tokens/stretched.h - ids of a stream that stand for several tokens each: images in a text.
//
// A text has one id where an image stands. The model takes as many tokens there as the image costs,
// so a unit has the id that many times. Thread-safety: immutable.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tokens/stream.h"

namespace nostall::tokens {

class Stretched {
 public:
  // Places in the stream, rising, and what each costs. Throws Error(usage) if there is not one cost of
  // 1 or more for each place.
  Stretched(std::vector<uint64_t> places, std::span<const uint32_t> costs);

  // Tokens that those of the stream from `begin` to `end` are.
  uint64_t length(uint64_t begin, uint64_t end) const noexcept {
    return end - begin + added_[first(end)] - added_[first(begin)];
  }
  size_t size() const noexcept { return places_.size(); }
  // The first one at `token` or behind it.
  size_t first(uint64_t token) const noexcept;
  uint64_t place(size_t i) const noexcept { return places_[i]; }
  uint64_t cost(size_t i) const noexcept { return added_[i + 1] - added_[i] + 1; }
  uint64_t fingerprint() const noexcept { return fingerprint_; }

 private:
  std::vector<uint64_t> places_;
  std::vector<uint64_t>
      added_;  // of those before each, what they cost more than one token; the sum
  uint64_t fingerprint_ = 0;
};

// Where pieces of at most `most` tokens begin, and the end of the stream: every document is cut into
// as few as it takes, each as long as can be, text between any two tokens and an image nowhere.
// Throws Error(usage) for an image that costs more.
std::vector<uint64_t> cut_documents(const Documents& documents, const Stretched& stretched,
                                    uint64_t most);

// Where the id stands, by the documents that a scan finds if it ends them (scan_documents).
std::vector<uint64_t> places_of(const Stream& stream, const Documents& ended, uint64_t id,
                                unsigned threads);

}  // namespace nostall::tokens
