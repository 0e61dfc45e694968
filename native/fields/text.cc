// JSON is checked by a walk without recursion: a stack of bits says what is open.
#include "fields/text.h"

#include <bitset>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "base/utf8.h"
#include "fields/numbers.h"

namespace nostall::fields {
namespace {

bool blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool digit(char c) { return c >= '0' && c <= '9'; }

class Json {
 public:
  explicit Json(std::string_view text) : text_(text) {}

  // The walk: after a value comes what closes or continues the innermost open array or object.
  bool check() {
    for (;;) {
      blanks();
      if (!value()) return false;
      while (complete_) {
        blanks();
        if (depth_ == 0) return at_ == text_.size();
        if (take(',')) {
          if (objects_[depth_ - 1] && !key()) return false;
          break;
        }
        if (!take(objects_[depth_ - 1] ? '}' : ']')) return false;
        --depth_;
      }
    }
  }
  size_t place() const { return at_; }

 private:
  bool take(char c) {
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void blanks() {
    while (at_ < text_.size() && blank(text_[at_])) ++at_;
  }
  bool value() {
    complete_ = true;
    if (at_ == text_.size()) return false;
    const char c = text_[at_];
    if (c == '{' || c == '[') return open(c == '{');
    if (c == '"') return quoted();
    if (c == '-' || digit(c)) return number();
    for (const std::string_view word : {"true", "false", "null"}) {
      if (text_.substr(at_).starts_with(word)) {
        at_ += word.size();
        return true;
      }
    }
    return false;
  }
  bool open(bool object) {
    if (depth_ == kMostNesting) return false;
    ++at_;
    blanks();
    if (take(object ? '}' : ']')) return true;
    objects_[depth_++] = object;
    complete_ = false;
    return !object || key();
  }
  bool key() {
    blanks();
    if (at_ == text_.size() || text_[at_] != '"' || !quoted()) return false;
    blanks();
    return take(':');
  }
  bool quoted() {
    for (++at_; at_ < text_.size(); ++at_) {
      const auto c = static_cast<unsigned char>(text_[at_]);
      if (c == '"') {
        ++at_;
        return true;
      }
      if (c < 0x20) return false;
      if (c == '\\' && !escape()) return false;
    }
    return false;
  }
  bool escape() {
    if (++at_ == text_.size()) return false;
    if (text_[at_] != 'u')
      return std::string_view("\"\\/bfnrt").find(text_[at_]) != std::string_view::npos;
    for (int i = 0; i < 4; ++i) {
      if (++at_ == text_.size() || std::isxdigit(static_cast<unsigned char>(text_[at_])) == 0) {
        return false;
      }
    }
    return true;
  }
  bool digits() {
    const size_t begin = at_;
    while (at_ < text_.size() && digit(text_[at_])) ++at_;
    return at_ > begin && at_ - begin <= kMostDigits;
  }
  bool number() {
    take('-');
    if (!take('0') && !digits()) return false;
    if (take('.') && !digits()) return false;
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      return digits();
    }
    return true;
  }

  std::string_view text_;
  size_t at_ = 0, depth_ = 0;
  bool complete_ = false;  // the last value is: nothing of it is open
  std::bitset<kMostNesting> objects_;
};

template <typename T>
bool store(std::string_view text, std::byte* out) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return false;
  std::memcpy(out, &value, sizeof value);
  return true;
}

bool store_half(std::string_view text, std::byte* out) {
  float value = 0;
  return store<float>(text, reinterpret_cast<std::byte*>(&value)) &&
         store_number(Type::float16, double{value}, out);
}

bool store_as(std::string_view text, Type type, std::byte* out) {
  switch (type) {
    case Type::boolean:
      return text.size() == 1 && text[0] <= '1' && store<uint8_t>(text, out);
    case Type::uint8:
      return store<uint8_t>(text, out);
    case Type::uint16:
      return store<uint16_t>(text, out);
    case Type::uint32:
      return store<uint32_t>(text, out);
    case Type::uint64:
      return store<uint64_t>(text, out);
    case Type::int8:
      return store<int8_t>(text, out);
    case Type::int16:
      return store<int16_t>(text, out);
    case Type::int32:
      return store<int32_t>(text, out);
    case Type::int64:
      return store<int64_t>(text, out);
    case Type::float16:
      return store_half(text, out);
    case Type::float32:
      return store<float>(text, out);
    case Type::float64:
      break;
  }
  return store<double>(text, out);
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

size_t valid_utf8(std::span<const std::byte> bytes) noexcept {
  const size_t size = bytes.size();
  size_t i = 0;
  while (i < size) {
    uint64_t eight = 0;
    if (size - i >= sizeof eight) {  // most text is ASCII
      std::memcpy(&eight, bytes.data() + i, sizeof eight);
      if ((eight & 0x8080808080808080u) == 0) {
        i += sizeof eight;
        continue;
      }
    }
    const size_t length = utf8_character(text_of(bytes.subspan(i)));
    if (length == 0) return i;
    i += length;
  }
  return size;
}

Result<std::monostate> check_json(std::span<const std::byte> bytes) {
  if (const size_t good = valid_utf8(bytes); good != bytes.size()) {
    return Error(ErrorKind::corruption, "its byte " + std::to_string(good) + " is not UTF-8");
  }
  Json json(text_of(bytes));
  if (json.check()) return std::monostate{};
  return Error(ErrorKind::corruption, "it is not JSON at byte " + std::to_string(json.place()));
}

Result<std::monostate> parse_number(std::span<const std::byte> bytes, Type type, std::byte* out) {
  std::string_view text = text_of(bytes);
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  if (store_as(text, type, out)) return std::monostate{};
  std::string shown(text.substr(0, 20));
  for (char& c : shown) {
    if (c < ' ' || c > '~') c = '?';
  }
  return Error(ErrorKind::corruption,
               "'" + shown + "' is not a number of type " + std::string(name_of(type)));
}

}  // namespace nostall::fields
