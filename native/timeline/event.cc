// A parser of one event, without recursion and without copies. The cursor has a sticky failure, so
// the code reads fields one after the other and checks once. Values of fields that are not wanted
// are passed over by counting brackets.
#include "timeline/event.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace nostall::timeline {
namespace {

// A cursor that fails for good: once `status` is not event, every step is a no-op.
struct Cursor {
  const char* at;
  const char* end;
  Parsed status = Parsed::event;

  bool ok() const { return status == Parsed::event; }
  void fail(Parsed why) {
    if (ok()) status = why;
  }
  // The next byte that is not white space, or 0 at the end.
  char peek() {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) ++at;
    if (at == end) {
      fail(Parsed::more);
      return 0;
    }
    return *at;
  }
  bool take(char expected) {
    if (peek() != expected) {
      fail(Parsed::bad);
      return false;
    }
    ++at;
    return ok();
  }
};

std::string_view take_string(Cursor& c) {
  if (!c.take('"')) return {};
  const char* const begin = c.at;
  const char* p = begin;
  while (p < c.end && *p != '"') {
    if (*p == '\\') ++p;
    ++p;
  }
  if (p >= c.end) {
    c.fail(Parsed::more);
    return {};
  }
  c.at = p + 1;
  return {begin, static_cast<size_t>(p - begin)};
}

std::string_view take_scalar(Cursor& c) {
  const char* const begin = c.at;
  while (c.at < c.end) {
    const char b = *c.at;
    const bool part = (b >= '0' && b <= '9') || (b >= 'a' && b <= 'z') || (b >= 'A' && b <= 'Z') ||
                      b == '-' || b == '+' || b == '.';
    if (!part) break;
    ++c.at;
  }
  if (c.at == c.end) c.fail(Parsed::more);
  if (c.at == begin) c.fail(Parsed::bad);
  return {begin, static_cast<size_t>(c.at - begin)};
}

// Passes over any value; the nesting is counted, not recursed into.
void skip_value(Cursor& c, int depth) {
  std::array<char, kMaxDepth> closers{};
  const int bottom = depth;
  bool value_next = true;
  while (c.ok()) {
    const char b = c.peek();
    if (!c.ok()) return;
    if (value_next) {
      if (b == '{' || b == '[') {
        if (depth >= kMaxDepth) return c.fail(Parsed::bad);
        closers[static_cast<size_t>(depth++)] = b == '{' ? '}' : ']';
        ++c.at;
        const char inner = c.peek();
        if (!c.ok()) return;
        if (inner == closers[static_cast<size_t>(depth - 1)]) {
          value_next = false;
        } else if (b == '{') {
          take_string(c);
          c.take(':');
        }
        continue;
      }
      if (b == '"') {
        take_string(c);
      } else {
        take_scalar(c);
      }
      value_next = false;
    } else if (b == ',' && depth > bottom) {
      ++c.at;
      if (closers[static_cast<size_t>(depth - 1)] == '}') {
        take_string(c);
        c.take(':');
      }
      value_next = true;
    } else if (depth > bottom && b == closers[static_cast<size_t>(depth - 1)]) {
      --depth;
      ++c.at;
    } else {
      return c.fail(Parsed::bad);
    }
    if (!value_next && depth == bottom) return;
  }
}

// A number of microseconds in nanoseconds, exact to the nanosecond; kNoTime for what is no number
// or does not fit.
int64_t to_nanoseconds(std::string_view text) {
  constexpr int64_t kMost = 9'000'000'000'000'000;  // microseconds
  size_t i = 0;
  const bool negative = !text.empty() && text[0] == '-';
  if (negative) i = 1;
  int64_t whole = 0;
  const size_t first = i;
  for (; i < text.size() && text[i] >= '0' && text[i] <= '9'; ++i) {
    whole = whole * 10 + (text[i] - '0');
    if (whole > kMost) return kNoTime;
  }
  if (i == first) return kNoTime;
  int64_t nano = 0;
  if (i < text.size() && text[i] == '.') {
    int64_t unit = 100;
    for (++i; i < text.size() && text[i] >= '0' && text[i] <= '9'; ++i, unit /= 10) {
      nano += unit * (text[i] - '0');
    }
  }
  if (i < text.size()) {
    if (text[i] != 'e' && text[i] != 'E') return kNoTime;
    const std::string copy(text);
    char* rest = nullptr;
    const double value = std::strtod(copy.c_str(), &rest);
    if (*rest != 0 || !(std::abs(value) <= static_cast<double>(kMost))) return kNoTime;
    return std::llround(value * 1e3);
  }
  const int64_t value = whole * 1000 + nano;
  return negative ? -value : value;
}

int64_t to_integer(std::string_view text) {
  int64_t value = 0;
  if (text.empty() || text.size() > 18) return -1;
  for (const char b : text) {
    if (b < '0' || b > '9') return -1;
    value = value * 10 + (b - '0');
  }
  return value;
}

void take_args(Cursor& c, Event& out) {
  if (!c.take('{')) return;
  if (c.peek() == '}') {
    ++c.at;
    return;
  }
  while (c.ok()) {
    const std::string_view key = take_string(c);
    if (!c.take(':')) return;
    const bool text = c.peek() == '"';
    if (text && key == "name") {
      out.arg_name = take_string(c);
    } else if (text && key == "dtype") {
      out.dtype = take_string(c);
    } else if (text && key == "shape") {
      out.shape = take_string(c);
    } else {
      skip_value(c, 2);
    }
    const char b = c.peek();
    if (!c.ok()) return;
    ++c.at;
    if (b == '}') return;
    if (b != ',') return c.fail(Parsed::bad);
  }
}

void take_field(Cursor& c, std::string_view key, Event& out) {
  const char b = c.peek();
  if (!c.ok()) return;
  if (b == '"' && key == "name") {
    out.name = take_string(c);
  } else if (b == '"' && key == "ph") {
    const std::string_view value = take_string(c);
    out.phase = value.size() == 1 ? value[0] : 0;
  } else if (b == '"' && key == "cat") {
    out.category = take_string(c);
  } else if (b == '{' && key == "args") {
    take_args(c, out);
  } else if (b == '[' && key == "traceEvents") {
    ++c.at;
    c.fail(Parsed::container);
  } else if (b == '"' || b == '{' || b == '[') {
    skip_value(c, 1);
  } else {
    const std::string_view value = take_scalar(c);
    if (!c.ok()) return;
    if (key == "ts") out.time = to_nanoseconds(value);
    if (key == "dur") out.duration = std::max<int64_t>(0, to_nanoseconds(value));
    if (key == "pid") out.pid = to_integer(value);
  }
}

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xc0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xe0 | (code >> 12));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (code & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | (code >> 18));
    out += static_cast<char>(0x80 | ((code >> 12) & 0x3f));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (code & 0x3f));
  }
}

// Four hexadecimal digits at `i`, or -1.
int32_t hex4(std::string_view text, size_t i) {
  if (i + 4 > text.size()) return -1;
  int32_t value = 0;
  for (size_t k = i; k < i + 4; ++k) {
    const char b = text[k];
    const int digit = b >= '0' && b <= '9'   ? b - '0'
                      : b >= 'a' && b <= 'f' ? b - 'a' + 10
                      : b >= 'A' && b <= 'F' ? b - 'A' + 10
                                             : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

}  // namespace

Parsed parse_event(std::string_view text, Event& out) {
  out = Event{};
  Cursor c{text.data(), text.data() + text.size()};
  if (c.take('{')) {
    if (c.peek() == '}') {
      ++c.at;
    } else {
      while (c.ok()) {
        const std::string_view key = take_string(c);
        if (!c.take(':')) break;
        take_field(c, key, out);
        if (!c.ok()) break;
        const char b = c.peek();
        if (!c.ok()) break;
        ++c.at;
        if (b == '}') break;
        if (b != ',') c.fail(Parsed::bad);
      }
    }
  }
  out.raw = text.substr(0, static_cast<size_t>(c.at - text.data()));
  return c.status;
}

std::string unescape(std::string_view raw) {
  std::string out;
  out.reserve(raw.size());
  for (size_t i = 0; i < raw.size(); ++i) {
    if (raw[i] != '\\' || i + 1 == raw.size()) {
      out += raw[i];
      continue;
    }
    const char b = raw[++i];
    if (b != 'u') {
      const char* const known = std::strchr("n\nt\tr\rb\bf\f", b);
      out += known != nullptr && b > ' ' ? known[1] : b;
      continue;
    }
    int32_t code = hex4(raw, i + 1);
    if (code < 0) {
      out += b;
      continue;
    }
    i += 4;
    if (code >= 0xd800 && code < 0xdc00 && i + 2 < raw.size() && raw[i + 1] == '\\' &&
        raw[i + 2] == 'u') {
      const int32_t low = hex4(raw, i + 3);
      if (low >= 0xdc00 && low < 0xe000) {
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        i += 6;
      }
    }
    append_utf8(out, code >= 0xd800 && code < 0xe000 ? 0xfffd : static_cast<uint32_t>(code));
  }
  return out;
}

int64_t tensor_bytes(std::string_view dtype, std::string_view shape) {
  static constexpr std::array<std::pair<std::string_view, int64_t>, 13> kSizes = {
      {{"uint8", 1},
       {"int8", 1},
       {"bool", 1},
       {"byte", 1},
       {"uint16", 2},
       {"int16", 2},
       {"float16", 2},
       {"bfloat16", 2},
       {"int32", 4},
       {"float32", 4},
       {"int64", 8},
       {"float64", 8},
       {"complex64", 8}}};
  int64_t bytes = -1;
  for (const auto& [name, size] : kSizes) {
    if (name == dtype) bytes = size;
  }
  if (bytes < 0 || shape.size() < 2 || shape.front() != '[' || shape.back() != ']') return -1;
  const std::string_view inner = shape.substr(1, shape.size() - 2);
  if (inner.find_first_not_of(' ') == std::string_view::npos) return bytes;  // "[]": one number
  size_t begin = 0;
  while (begin <= inner.size()) {
    const size_t end = std::min(inner.find(',', begin), inner.size());
    std::string_view part = inner.substr(begin, end - begin);
    while (!part.empty() && part.front() == ' ') part.remove_prefix(1);
    while (!part.empty() && part.back() == ' ') part.remove_suffix(1);
    const int64_t extent = to_integer(part);
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) return -1;
    begin = end + 1;
  }
  return bytes;
}

}  // namespace nostall::timeline
