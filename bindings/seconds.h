// Python's seconds as nanoseconds.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "base/error.h"

namespace nostall::bindings {

enum class Zero : uint8_t { refused, allowed };

// Infinity and what is beyond 146 years become those: half of what an int64_t holds, so that a
// deadline, this after the clock's time, does not overflow either. Throws Error(usage) for NaN, for
// what is negative and, unless allowed, for zero.
inline std::chrono::nanoseconds nanoseconds_of(const char* name, double seconds,
                                               Zero zero = Zero::refused) {
  constexpr int64_t kForever = int64_t{1} << 62;
  if (std::isnan(seconds) || seconds < 0 || (seconds == 0 && zero == Zero::refused)) {
    char value[32];
    std::snprintf(value, sizeof value, "%g", seconds);
    throw Error(ErrorKind::usage, std::string(name) + " must be " +
                                      (zero == Zero::allowed ? "0 or more" : "more than 0") +
                                      " seconds, not " + value);
  }
  if (seconds >= static_cast<double>(kForever) / 1e9) return std::chrono::nanoseconds(kForever);
  const auto whole = static_cast<int64_t>(seconds * 1e9);
  // What is positive, however short, stays so.
  return std::chrono::nanoseconds(seconds > 0 && whole == 0 ? 1 : whole);
}

}  // namespace nostall::bindings
