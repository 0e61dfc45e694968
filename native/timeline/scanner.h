// timeline/scanner.h - events of a Chrome-format trace from a stream of bytes, in bounded memory.
//
// Takes `[{...}, {...}`, closed or not, one or many events per line, and objects with a
// "traceEvents" array. Bytes that are not an event are skipped up to the next '{' and counted, so
// one torn line costs that line. Keeps at most kMaxEventBytes between calls. Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "timeline/event.h"

namespace nostall::timeline {

// What the scan met; offsets are of the uncompressed stream.
struct ScanReport {
  uint64_t bytes = 0;
  uint64_t events = 0;
  uint64_t foreign = 0;        // of them, objects without a "ph"
  uint64_t damaged = 0;        // stretches of bytes that are no event
  uint64_t damaged_bytes = 0;  // their length together
  int64_t first_damage = -1;   // offset of the first
  int64_t cut_off = -1;        // offset of an event that the end of the stream cuts off
  bool closed = false;         // the array of events ends with ']'
  std::string head;            // fields of the container before "traceEvents", at most 64 KiB
};

class Scanner {
 public:
  // Called for each event with its offset; the event's views die when it returns.
  using Sink = std::function<void(const Event&, uint64_t offset)>;

  explicit Scanner(Sink sink) : sink_(std::move(sink)) {}

  void feed(std::string_view bytes);
  // No more bytes will come.
  void finish();

  const ScanReport& report() const { return report_; }

 private:
  // Scans `text`; returns how many bytes it is done with.
  size_t scan(std::string_view text, bool last);
  void damage(uint64_t offset, uint64_t count);

  Sink sink_;
  ScanReport report_;
  std::string carry_;      // the beginning of an event that the last bytes cut
  uint64_t consumed_ = 0;  // offset of the first byte of carry_
  bool in_damage_ = false;
};

}  // namespace nostall::timeline
