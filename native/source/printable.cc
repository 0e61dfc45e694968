// Names and keys of data sets in messages, which must be text whatever the names are.
#include <cstdio>

#include "base/utf8.h"
#include "source/source.h"

namespace nostall::source {
namespace {

constexpr size_t kMost = 120;

// C0, DEL and C1.
bool control(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  return first < 0x20 || first == 0x7f ||
         (first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0);
}

}  // namespace

std::string printable(std::string_view name) {
  std::string text;
  while (!name.empty()) {
    if (text.size() >= kMost) return text + "...";
    const size_t size = utf8_character(name);
    const bool as_it_is = size > 0 && !control(name);
    if (as_it_is) {
      text += name.substr(0, size);
    } else {
      char escaped[5];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned char>(name[0]));
      text += escaped;
    }
    name.remove_prefix(as_it_is ? size : 1);
  }
  return text;
}

}  // namespace nostall::source
