// image/stages.h - the pixels of one stage: resampled, windowed, a row at a time.
// Thread-safety: functions of their arguments; StageBuffers belong to one thread.
#pragma once

#include <functional>
#include <vector>

#include "image/bitmap.h"
#include "image/geometry.h"
#include "image/resample.h"

namespace nostall::image {

struct StageBuffers {
  explicit StageBuffers(HeldBytes* counted) : narrow(counted), row(counted), padded(counted) {}
  Filter x, y;
  Buffer narrow, row, padded;
  std::vector<const uint8_t*> rows;
  std::vector<int64_t> columns;
};

// Gets each row of the window: its number from 0, and 4-byte pixels, valid during the call.
using RowSink = std::function<void(int64_t y, const uint8_t* row)>;

void run(const Stage& stage, const Bitmap& in, StageBuffers& buffers, const RowSink& sink);

// The part of the stage's input that its window is made of.
Box support_of(const Stage& stage);
// At which part, 1/2^k, the input may be decoded.
unsigned shrink_of(const Stage& stage);

// The pixel that nearest resampling takes for place `i` of `to`.
int64_t nearest(Interpolation interpolation, int64_t i, int64_t from, int64_t to) noexcept;
// The pixel that a border of the mode shows at place `i`, which may lie outside 0 to `size` - 1.
int64_t inside(PadMode mode, int64_t i, int64_t size) noexcept;

}  // namespace nostall::image
