// source/reader_choice.h - when to keep many reads in flight: a pure decision, with its reason.
#pragma once

#include <cstdint>
#include <string_view>

namespace nostall::source {

// A read that takes longer than this waits for a device or a network, not for a copy: then depth
// pays. A warm open + read + close of 100 KB takes 10 to 15 us here; an NVMe read about 100 us.
inline constexpr double kSlowRead = 150e-6;

struct ReaderChoice {
  bool many_in_flight = false;
  std::string_view reason;
};

// `seconds`: running mean of a read's time, one at a time; 0 while unknown.
inline ReaderChoice choose_reader(double seconds) noexcept {
  if (seconds == 0.0) return {false, "not measured yet"};
  if (seconds > kSlowRead) return {true, "reads wait for the storage"};
  return {false, "reads come from memory"};
}

}  // namespace nostall::source
