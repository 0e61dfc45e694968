// base/fnv.h - FNV-1a, 64 bits, over numbers and texts: fingerprints of what two processes must
// have in common. Thread-safety: values.
#pragma once

#include <cstdint>
#include <string_view>

namespace nostall {

class Fnv {
 public:
  // Its eight bytes, lowest first.
  Fnv& number(uint64_t value) noexcept {
    for (int i = 0; i < 8; ++i) byte(static_cast<uint8_t>(value >> (8 * i)));
    return *this;
  }
  Fnv& bytes(std::string_view text) noexcept {
    for (const char c : text) byte(static_cast<uint8_t>(c));
    return *this;
  }
  // Its length, then its bytes.
  Fnv& text(std::string_view text) noexcept { return number(text.size()).bytes(text); }
  uint64_t value() const noexcept { return hash_; }

 private:
  void byte(uint8_t b) noexcept { hash_ = (hash_ ^ b) * 0x100000001b3u; }
  uint64_t hash_ = 0xcbf29ce484222325u;
};

}  // namespace nostall
