// base/utf8.h - one character of UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace nostall {

// Bytes of the character at the start of `text`; 0 if the bytes there are none: cut, longer than they
// must be, half of a pair of UTF-16, behind the last character. `text` is not empty.
inline size_t utf8_character(std::string_view text) noexcept {
  const auto at = [text](size_t i) { return uint32_t{static_cast<unsigned char>(text[i])}; };
  const uint32_t first = at(0);
  if (first < 0x80) return 1;
  const size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < size) return 0;
  uint32_t code = first & (0x7fu >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((at(i) & 0xc0u) != 0x80) return 0;
    code = code << 6 | (at(i) & 0x3fu);
  }
  const bool longer = size == 3 ? code < 0x800 : size == 4 && code < 0x10000;
  const bool half = code >= 0xd800 && code < 0xe000;
  return longer || half || code > 0x10ffff ? 0 : size;
}

}  // namespace nostall
