// Two passes of a filter, or a table of columns for nearest; what lies outside the window's image is
// filled.
#include "image/stages.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace nostall::image {
namespace {

// A DCT scale is used while the box decoded has at least this many pixels for each one of the
// result: the filter then still averages more than what the scaled transform has merged.
constexpr int64_t kShrinkMargin = 2;

void fill_row(uint8_t* row, int64_t width, const std::array<uint8_t, 3>& fill) {
  for (int64_t x = 0; x < width; ++x, row += 4) {
    for (size_t c = 0; c < 3; ++c) row[c] = fill[c];
    row[3] = 0;
  }
}

void run_nearest(const Stage& stage, const Bitmap& in, StageBuffers& b, const RowSink& sink) {
  const Box& window = stage.window;
  const auto source = [&](int64_t i, int64_t box, int64_t size, int64_t full, int64_t origin) {
    return i < 0 || i >= full ? -1 : box + nearest(stage.interpolation, i, size, full) - origin;
  };
  b.columns.resize(static_cast<size_t>(window.width));
  for (int64_t x = 0; x < window.width; ++x) {
    b.columns[static_cast<size_t>(x)] =
        source(x + window.x, stage.box.x, stage.box.width, stage.width, in.x);
  }
  uint8_t* row = b.row.reserve(static_cast<size_t>(window.width) * 4);
  for (int64_t y = 0; y < window.height; ++y) {
    fill_row(row, window.width, stage.fill);
    const int64_t from = source(y + window.y, stage.box.y, stage.box.height, stage.height, in.y);
    if (from >= 0) {
      const uint8_t* pixels = in.pixels + static_cast<size_t>(from) * in.stride;
      for (size_t x = 0; x < b.columns.size(); ++x) {
        if (b.columns[x] >= 0) std::memcpy(row + 4 * x, pixels + 4 * b.columns[x], 4);
      }
    }
    sink(y, row);
  }
}

}  // namespace

int64_t nearest(Interpolation interpolation, int64_t i, int64_t from, int64_t to) noexcept {
  // torch's arithmetic, in single precision.
  const float scale = static_cast<float>(from) / static_cast<float>(to);
  const float at = static_cast<float>(i) + (interpolation == Interpolation::nearest ? 0.0f : 0.5f);
  return std::min(static_cast<int64_t>(std::floor(at * scale)), from - 1);
}

int64_t inside(PadMode mode, int64_t i, int64_t size) noexcept {
  const int64_t own = mode == PadMode::reflect ? 0 : 1;  // the edge is shown once, or twice
  if (mode != PadMode::edge) {
    if (i < 0) i = -i - own;
    if (i >= size) i = 2 * size - 2 + own - i;
  }
  return std::clamp<int64_t>(i, 0, size - 1);
}

void run(const Stage& stage, const Bitmap& in, StageBuffers& b, const RowSink& sink) {
  if (stage.resizes() && (stage.interpolation == Interpolation::nearest ||
                          stage.interpolation == Interpolation::nearest_exact)) {
    run_nearest(stage, in, b, sink);
    return;
  }
  const Box& window = stage.window;
  const int64_t x0 = std::max<int64_t>(0, window.x), y0 = std::max<int64_t>(0, window.y);
  const int64_t columns = std::min(stage.width, window.x + window.width) - x0;
  const int64_t rows = std::min(stage.height, window.y + window.height) - y0;
  uint8_t* padded = b.padded.reserve(static_cast<size_t>(window.width) * 4);
  fill_row(padded, window.width, stage.fill);
  if (columns <= 0 || rows <= 0) {
    for (int64_t y = 0; y < window.height; ++y) sink(y, padded);
    return;
  }

  const Curve curve{stage.interpolation == Interpolation::bicubic, stage.antialias};
  const double unit = static_cast<double>(int64_t{1} << in.shrink);
  const auto edge = [unit](int64_t at) { return static_cast<double>(at) / unit; };
  b.x.prepare(edge(stage.box.x), edge(stage.box.x + stage.box.width), stage.width, x0, columns,
              in.x, in.width, curve);
  b.y.prepare(edge(stage.box.y), edge(stage.box.y + stage.box.height), stage.height, y0, rows, in.y,
              in.height, curve);
  const Kernels& kernel = kernels();

  // The horizontal pass, on the rows that the vertical one reads.
  const size_t bytes = static_cast<size_t>(columns) * 4;
  const uint8_t* narrow = in.pixels;
  size_t stride = in.stride;
  const int64_t first = b.y.first.front(), last = b.y.first.back() + b.y.count.back() - 1;
  if (b.x.identity) {
    narrow += size_t{4} * static_cast<size_t>(b.x.first.front());
  } else {
    stride = (bytes + 31) / 32 * 32;
    uint8_t* out = b.narrow.reserve(stride * static_cast<size_t>(last - first + 1));
    for (int64_t y = first; y <= last; y += 2) {
      const int64_t next = std::min(y + 1, last);
      kernel.horizontal(b.x, in.pixels + static_cast<size_t>(y) * in.stride,
                        in.pixels + static_cast<size_t>(next) * in.stride,
                        out + static_cast<size_t>(y - first) * stride,
                        out + static_cast<size_t>(next - first) * stride);
    }
    narrow = out;
  }
  const auto at = [&](int64_t y) {
    return narrow + static_cast<size_t>(b.x.identity ? y : y - first) * stride;
  };

  uint8_t* row = b.row.reserve((bytes + 31) / 32 * 32);
  for (int64_t y = 0; y < window.height; ++y) {
    const int64_t i = y + window.y - y0;
    if (i < 0 || i >= rows) {
      fill_row(padded, window.width, stage.fill);
      sink(y, padded);
      continue;
    }
    const auto index = static_cast<size_t>(i);
    const uint8_t* result = row;
    if (b.y.identity) {
      result = at(b.y.first[0] + i);
    } else {
      const int32_t taps = (b.y.count[index] + 1) / 2 * 2;
      b.rows.resize(static_cast<size_t>(taps));
      for (int32_t tap = 0; tap < taps; ++tap) {
        b.rows[static_cast<size_t>(tap)] =
            at(b.y.first[index] + std::min(tap, b.y.count[index] - 1));
      }
      kernel.vertical(b.rows.data(), &b.y.weights[index * static_cast<size_t>(b.y.taps)], taps, row,
                      bytes);
    }
    if (columns < window.width) {
      std::memcpy(padded + (x0 - window.x) * 4, result, bytes);
      result = padded;
    }
    sink(y, result);
  }
}

// The part of the stage's input that its window is made of.
Box support_of(const Stage& stage) {
  const double reach = stage.interpolation == Interpolation::bicubic ? 2 : 1;
  const auto axis = [reach](int64_t box, int64_t size, int64_t full, int64_t window,
                            int64_t count) {
    const double scale = static_cast<double>(size) / static_cast<double>(full);
    const double support = reach * std::max(1.0, scale) + 1;
    const auto low = static_cast<int64_t>(static_cast<double>(window) * scale - support);
    const auto high =
        static_cast<int64_t>(std::ceil(static_cast<double>(window + count) * scale + support));
    const int64_t begin = std::clamp<int64_t>(low, 0, size - 1);
    return std::pair{box + begin, std::clamp<int64_t>(high, begin + 1, size) - begin};
  };
  const auto [x, w] =
      axis(stage.box.x, stage.box.width, stage.width, stage.window.x, stage.window.width);
  const auto [y, h] =
      axis(stage.box.y, stage.box.height, stage.height, stage.window.y, stage.window.height);
  return {x, y, w, h};
}

unsigned shrink_of(const Stage& stage) {
  const bool averages = stage.antialias && (stage.interpolation == Interpolation::bilinear ||
                                            stage.interpolation == Interpolation::bicubic);
  unsigned shrink = 0;
  while (averages && shrink < 3 &&
         (stage.box.width >> (shrink + 1)) >= kShrinkMargin * stage.width &&
         (stage.box.height >> (shrink + 1)) >= kShrinkMargin * stage.height) {
    ++shrink;
  }
  return shrink;
}

}  // namespace nostall::image
