// base/fnv.h - FNV-1a, 64 bits, over numbers and texts: fingerprints of what two processes must
// have in common. Thread-safety: values.
#pragma once

#include <cstdint>
#include <string_view>

namespace nostall {

class Fnv {
 public:
  constexpr Fnv() noexcept = default;
  // Goes on from the value of an earlier one.
  explicit constexpr Fnv(uint64_t value) noexcept : hash_(value) {}
  // Its eight bytes, lowest first.
  constexpr Fnv& number(uint64_t value) noexcept {
    for (int i = 0; i < 8; ++i) byte(static_cast<uint8_t>(value >> (8 * i)));
    return *this;
  }
  constexpr Fnv& bytes(std::string_view text) noexcept {
    for (const char c : text) byte(static_cast<uint8_t>(c));
    return *this;
  }
  // Its length, then its bytes.
  constexpr Fnv& text(std::string_view text) noexcept { return number(text.size()).bytes(text); }
  // All of it in one step: quicker than number(), and another hash.
  constexpr Fnv& word(uint64_t value) noexcept {
    hash_ = (hash_ ^ value) * 0x100000001b3u;
    return *this;
  }
  constexpr uint64_t value() const noexcept { return hash_; }

 private:
  constexpr void byte(uint8_t b) noexcept { word(b); }
  uint64_t hash_ = 0xcbf29ce484222325u;
};

}  // namespace nostall
