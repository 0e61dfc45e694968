// timeline/event.h - one event of a Chrome-format trace, parsed in place.
//
// Traces are gigabytes, often cut off by a killed job, and come from anywhere. The parser is total:
// it looks at a range of bytes and says whether a whole event begins there. It copies nothing; the
// views live as long as the bytes. Cost: one pass over the event. Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace nostall::timeline {

inline constexpr int64_t kNoTime = std::numeric_limits<int64_t>::min();
inline constexpr int kMaxDepth = 32;                 // of brackets in one event
inline constexpr size_t kMaxEventBytes = 256 << 10;  // a longer one is skipped as damage

// Strings are as in the file: escapes are not resolved (see `unescape`).
struct Event {
  char phase = 0;             // "ph": B, E, X, i, M...; 0 if the object has none
  int64_t pid = -1;           // -1: absent, or not an integer
  int64_t time = kNoTime;     // "ts" in nanoseconds; kNoTime: absent, or beyond 290 years
  int64_t duration = 0;       // "dur" in nanoseconds
  std::string_view name;      // "name"
  std::string_view category;  // "cat"
  std::string_view arg_name;  // "args": {"name"}
  std::string_view dtype;     // "args": {"dtype"}
  std::string_view shape;     // "args": {"shape"}
  std::string_view raw;       // the whole object
};

enum class Parsed {
  event,      // `out` is filled
  container,  // an object whose "traceEvents" array holds the events: `out.raw` ends behind its '['
  more,       // the bytes end before the object does
  bad,        // not an object of JSON, or too deep
};

// What begins at `text`, whose first byte is '{'.
Parsed parse_event(std::string_view text, Event& out);

// A JSON string's content with its escapes resolved; an unpaired surrogate becomes U+FFFD.
std::string unescape(std::string_view raw);

// Bytes of a tensor of Horovod's "dtype" and "shape" ("[9216, 128]"); -1 if either is not
// understood or the product has no 63 bits.
int64_t tensor_bytes(std::string_view dtype, std::string_view shape);

}  // namespace nostall::timeline
