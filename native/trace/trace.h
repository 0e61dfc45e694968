// trace/trace.h - cheap recording of what each thread does and when. Read this first.
//
//   static const trace::Kind kRead = trace::define("data", "read", {"samples", "bytes"});
//   trace::Span span(kRead);
//   ... span.values = {16, 1 << 20};
//
// An event is a span of the node's one clock (base/clock.h) on one thread, with a few numbers. It
// goes into the thread's own ring buffer; one background thread empties all rings into a file
// (trace/writer.h). Off, which is the default, an event costs one relaxed load; on, two reads of
// the clock and a store of 80 bytes, without a lock or a system call. A ring that is full drops
// events and counts them: recording never waits. Kinds past kMaxKinds are recorded as one, "other".
// Memory: kRingEvents * 80 bytes per thread.
//
// Thread-safety: all functions from any thread; start and stop one at a time. A forked child does
// not record, for the file is its parent's; it may start a recording of its own.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "base/clock.h"

namespace nostall::trace {

inline constexpr size_t kArguments = 7;
inline constexpr size_t kRingEvents = 4096;
inline constexpr size_t kMaxKinds = 4096;  // and one more, "other"

using Values = std::array<int64_t, kArguments>;

// What happened: a category, a name, and the names of the first values.
struct Kind {
  uint16_t index = 0;
};

// The same kind for the same category and name. Past kMaxKinds kinds that is the kind "other", with
// one warning. Throws Error(usage) for more than kArguments arguments. Takes a lock: call it once
// per kind.
Kind define(std::string_view category, std::string_view name,
            std::initializer_list<std::string_view> arguments = {});

namespace detail {
extern std::atomic<bool> recording;
}

inline bool on() noexcept { return detail::recording.load(std::memory_order_relaxed); }

// A span from `begin` to `end`, nanoseconds of now_ns(). Nothing while not recording.
void record(Kind kind, int64_t begin, int64_t end, const Values& values = {}) noexcept;

// Records its own lifetime.
class Span {
 public:
  explicit Span(Kind kind) noexcept : kind_(kind), begin_(on() ? now_ns() : kNever) {}
  ~Span() {
    if (begin_ != kNever) record(kind_, begin_, now_ns(), values);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  Values values{};

 private:
  static constexpr int64_t kNever = -1;
  Kind kind_;
  int64_t begin_;
};

struct Config {
  std::string path;  // of the file, ending with .json.gz
  uint32_t rank = 0;
  uint32_t world = 1;
  std::chrono::milliseconds period{50};  // between two visits of the background thread
};

struct Summary {
  uint64_t events = 0;
  uint64_t dropped = 0;
  uint64_t bytes = 0;  // of the file
};

// Opens the file and records from now on. Throws Error(io) if it cannot be written, Error(usage) if
// this process records already. A file that fails later ends recording with a warning, not the job.
void start(const Config& config);
// Writes what is left and closes the file. Zeros if nothing was being recorded.
Summary stop();

}  // namespace nostall::trace
