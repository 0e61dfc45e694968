// fields/flac.h - FLAC files (RFC 9639) of 4 to 24 bits and up to 8 channels, as numbers.
//
// Total over untrusted bytes: every frame has its CRC compared. Thread-safety: a reader is used by one
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/error.h"
#include "image/bitmap.h"

namespace nostall::fields {

struct Flac {
  uint32_t channels = 0, rate = 0, bits = 0;  // frames per second; bits of a value
  uint64_t frames = 0;                        // of one value per channel; those that are there
  uint32_t block = 0;                         // the most frames that lie together
  std::span<const std::byte> blocks;
};

bool is_flac(std::span<const std::byte> bytes) noexcept;

// Reads the frames of a file from the first on. Values lie in `memory`, until the next read.
class FlacReader {
 public:
  FlacReader(const Flac& flac, image::Buffer& memory);

  // The next frames, interleaved, each value in [-1, 1). False if there are fewer: see error().
  bool read(std::span<float> out);
  // The number of frames in the next block, 0 behind the last one.
  uint32_t next_block();
  const std::optional<Error>& error() const noexcept { return error_; }

 private:
  bool read_block();

  Flac flac_;
  std::span<int32_t> values_;    // of one channel behind the other, flac_.block each
  uint32_t count_ = 0, at_ = 0;  // of the block: its frames, and those that were given
  std::optional<Error> error_;
};

// Error(corruption) if it is no such file, or has fewer frames than it promises. `memory` is used
// where all blocks have to be read to know their frames.
Result<Flac> parse_flac(std::span<const std::byte> bytes, image::Buffer& memory);

}  // namespace nostall::fields
