// Names and keys of data sets in messages, which must be text whatever the names are.
#include <cstdio>

#include "source/source.h"

namespace nostall::source {
namespace {

constexpr size_t kMost = 120;

// Bytes of the UTF-8 character at the start of `s`; 0 if there is none, or it is a control.
size_t character(std::string_view s) {
  const auto at = [s](size_t i) { return static_cast<unsigned char>(s[i]); };
  const unsigned first = at(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || s.size() < size) return 0;
  uint32_t code = first & (0x7f >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((at(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (at(i) & 0x3f);
  }
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  const bool control = code < 0xa0, longer = size == 3 ? code < 0x800 : size == 4 && code < 0x10000;
  return surrogate || control || longer || code > 0x10ffff ? 0 : size;
}

}  // namespace

std::string printable(std::string_view name) {
  std::string text;
  while (!name.empty()) {
    if (text.size() >= kMost) return text + "...";
    const size_t size = character(name);
    if (size > 0) {
      text += name.substr(0, size);
    } else {
      char escaped[5];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned char>(name[0]));
      text += escaped;
    }
    name.remove_prefix(size > 0 ? size : 1);
  }
  return text;
}

}  // namespace nostall::source
