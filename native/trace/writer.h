// trace/writer.h - events as Chrome's trace format (JSON), compressed, one file per rank.
//
//   {"schemaVersion": 1, "distributedInfo": {"backend": "nostall", "rank": 0, "world_size": 4},
//    "host_name": "n1", "baseTimeNanoseconds": B, "traceEvents": [
//     {"ph": "M", "name": "clock_offset", "args": {"monotonic_ns": M, "realtime_ns": R}}, ...
//     {"ph": "X", "cat": "data", "name": "read", "pid": 7, "tid": 9, "ts": 1.5, "dur": 2,
//      "args": {"samples": 16}}, ...]}
//
// "ts" and "dur" are microseconds; B + 1000 * ts is the time since 1970 as the writer's host had it
// at the start. The compressed stream is flushed every second, so that a killed job leaves all but
// the last second. Not thread-safe.
#pragma once

#include <sys/types.h>
#include <zlib.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trace/trace.h"

namespace nostall::trace {

// The text as a string of JSON, with its quotes; U+FFFD for each byte that is not UTF-8, as of a name
// that the system has cut.
std::string quoted(std::string_view text);

// A kind's texts as they stand in the file.
struct KindText {
  std::string before;                  // up to the thread's number
  std::vector<std::string> arguments;  // "samples": with quotes and colon
};

KindText kind_text(std::string_view category, std::string_view name,
                   const std::vector<std::string>& arguments, pid_t pid);

class Writer {
 public:
  // Throws Error(io).
  explicit Writer(const Config& config);
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void thread(pid_t tid, std::string_view name);
  void event(const KindText& kind, pid_t tid, int64_t begin, int64_t end, const Values& values);
  // Compresses what was given; with `flush`, makes the file readable up to here. Throws Error(io).
  void write(bool flush);
  // Ends the JSON and the file; returns its size. Throws Error(io).
  uint64_t finish(uint64_t events, uint64_t dropped);

 private:
  void compress(int mode);

  std::string path_;
  int file_ = -1;
  z_stream stream_{};
  std::string text_;
  uint64_t bytes_ = 0;
};

}  // namespace nostall::trace
