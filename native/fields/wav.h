// fields/wav.h - uncompressed sound: RIFF WAVE files of PCM (8, 16, 24, 32 bits) or float32.
//
// Total over untrusted bytes; no memory is taken. Thread-safety: pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"

namespace nostall::fields {

struct Wav {
  enum class Coding : uint8_t { pcm8, pcm16, pcm24, pcm32, float32 };
  Coding coding = Coding::pcm16;
  uint32_t channels = 0, rate = 0;    // frames per second
  uint64_t frames = 0;                // of one value per channel
  std::span<const std::byte> values;  // frames * channels, interleaved
  // The values from `first` on, interleaved, each in [-1, 1); of float32 as they are.
  void read(uint64_t first, std::span<float> out) const noexcept;
};

// Error(corruption) if it is no such file, or its chunks promise more than there is.
Result<Wav> parse_wav(std::span<const std::byte> bytes);

}  // namespace nostall::fields
