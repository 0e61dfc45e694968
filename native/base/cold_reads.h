// base/cold_reads.h - when to keep many reads in flight: while they wait for a device.
//
// Thread-safety: a value of one thread.
#pragma once

#include <cstdint>

namespace nostall {

// Reads from memory gain nothing by others beside them. So a reader begins with one at a time, and
// records how long each took.
class ColdReads {
 public:
  // Whether the next reads should go side by side. While they do, one answer in kProbeEvery is no,
  // to measure whether the files are in memory now.
  bool many() noexcept { return cold() && ++since_probe_ % kProbeEvery != 0; }
  // What one read took by itself; whether it came from memory.
  bool took(uint64_t bytes, int64_t nanoseconds) noexcept {
    // Two in a row, for a single slow one may have lost its turn of the processor.
    slow_ = static_cast<double>(nanoseconds) * 1e-9 > cached_seconds(bytes) ? slow_ + 1 : 0;
    return slow_ == 0;
  }
  bool cold() const noexcept { return slow_ >= 2; }
  // What a read from the page cache takes at most.
  static double cached_seconds(uint64_t bytes) noexcept {
    return kCachedCall + static_cast<double>(bytes) * kCachedSecondsPerByte;
  }

 private:
  // A read from the page cache takes a system call and a copy at this speed or better; anything
  // slower came from a device.
  static constexpr double kCachedCall = 25e-6, kCachedSecondsPerByte = 1 / 2e9;
  static constexpr unsigned kProbeEvery = 64;

  unsigned slow_ = 0, since_probe_ = 0;
};

}  // namespace nostall
