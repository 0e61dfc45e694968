// Affine maps with nearest pixels run in 16.16 fixed point, as Pillow's do; everything else works
// out each place in double precision.
#include "image/warp.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace nostall::image {
namespace {

// Pillow's COORD: the pixel that holds a place, -1 outside the image.
int64_t coordinate(double at, int64_t size) {
  return at >= 0 && at < static_cast<double>(size) ? static_cast<int64_t>(at) : -1;
}

int64_t fixed(double value) { return static_cast<int64_t>(std::floor(value * 65536.0 + 0.5)); }

// Whether 16.16 bits can hold the places of all corners.
bool fits_fixed(const Projection& a, int64_t width, int64_t height) {
  for (const auto x : {0.0, static_cast<double>(width)}) {
    for (const auto y : {0.0, static_cast<double>(height)}) {
      if (!(std::abs(x * a[0] + y * a[1] + a[2]) < 32768.0) ||
          !(std::abs(x * a[3] + y * a[4] + a[5]) < 32768.0)) {
        return false;
      }
    }
  }
  return true;
}

// Calls put(index, place) for every pixel.
template <typename Put>
void scaled_places(const Projection& a, int64_t width, int64_t height, const Put& put) {
  std::vector<int64_t> columns(static_cast<size_t>(width));
  double at = a[2] + a[0] * 0.5;
  for (int64_t& column : columns) {
    column = coordinate(at, width);
    at += a[0];
  }
  double down = a[5] + a[4] * 0.5;
  for (int64_t y = 0, i = 0; y < height; ++y, down += a[4]) {
    const int64_t row = coordinate(down, height);
    for (const int64_t column : columns) {
      put(i++, row < 0 || column < 0 ? -1 : row * width + column);
    }
  }
}

template <typename Put>
void fixed_places(const Projection& a, int64_t width, int64_t height, const Put& put) {
  const int64_t a0 = fixed(a[0]), a1 = fixed(a[1]), a3 = fixed(a[3]), a4 = fixed(a[4]);
  int64_t row_x = fixed(a[2] + a[0] * 0.5 + a[1] * 0.5);
  int64_t row_y = fixed(a[5] + a[3] * 0.5 + a[4] * 0.5);
  const auto w = static_cast<uint64_t>(width), h = static_cast<uint64_t>(height);
  for (int64_t y = 0, i = 0; y < height; ++y, row_x += a1, row_y += a4) {
    int64_t at_x = row_x, at_y = row_y;
    for (int64_t x = 0; x < width; ++x, at_x += a0, at_y += a3) {
      const auto from_x = static_cast<uint64_t>(at_x >> 16);
      const auto from_y = static_cast<uint64_t>(at_y >> 16);
      put(i++, from_x < w && from_y < h ? static_cast<int64_t>(from_y * w + from_x) : -1);
    }
  }
}

struct Place {
  double x, y;
};
Place place_of(const Projection& a, double x, double y) {
  if (a[6] == 0 && a[7] == 0) return {a[0] * x + a[1] * y + a[2], a[3] * x + a[4] * y + a[5]};
  const double scale = a[6] * x + a[7] * y + 1;
  return {(a[0] * x + a[1] * y + a[2]) / scale, (a[3] * x + a[4] * y + a[5]) / scale};
}

template <typename Put>
void nearest_to(const Warp& warp, int64_t width, int64_t height, const Put& put) {
  const Projection& a = warp.to_source;
  if (warp.affine() && a[1] == 0 && a[3] == 0) return scaled_places(a, width, height, put);
  if (warp.affine() && fits_fixed(a, width, height)) return fixed_places(a, width, height, put);
  for (int64_t y = 0, i = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      const Place at = place_of(a, static_cast<double>(x) + 0.5, static_cast<double>(y) + 0.5);
      const int64_t column = coordinate(at.x, width), row = coordinate(at.y, height);
      put(i++, row < 0 || column < 0 ? -1 : row * width + column);
    }
  }
}

// The four bytes of a pixel, or of a line between pixels.
using Channels = float __attribute__((vector_size(16)));

Channels channels(const uint8_t* p) {
#if defined(__SSE2__)
  int pixel;
  std::memcpy(&pixel, p, 4);
  const __m128i zero = _mm_setzero_si128();
  const __m128i words = _mm_unpacklo_epi8(_mm_cvtsi32_si128(pixel), zero);
  return _mm_cvtepi32_ps(_mm_unpacklo_epi16(words, zero));
#else
  return Channels{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
                  static_cast<float>(p[3])};
#endif
}

// Pillow's cubic: convolution with a = -1.
Channels cubic(const Channels v[4], float d) {
  const Channels p2 = v[2] - v[0], p3 = 2 * (v[0] - v[1]) + v[2] - v[3];
  const Channels p4 = v[1] - v[0] - v[2] + v[3];
  return v[1] + d * (p2 + d * (p3 + d * p4));
}

class Sampler {
 public:
  explicit Sampler(const Surface& from) : from_(from) {}

  // Both want a place inside the image.
  void bilinear(Place at, uint8_t* out) const {
    const auto [x, dx] = split(at.x - 0.5);
    const auto [y, dy] = split(at.y - 0.5);
    const size_t left = column(x), right = column(x + 1);
    const uint8_t *above = row(y), *below = row(y + 1);
    const int w = static_cast<int>(dx * (1 << kBits));
#if defined(__SSE2__)
    const auto line = [&](const uint8_t* pixels) {
      int l, r;
      std::memcpy(&l, pixels + left, 4);
      std::memcpy(&r, pixels + right, 4);
      const __m128i pairs = _mm_unpacklo_epi8(_mm_cvtsi32_si128(l), _mm_cvtsi32_si128(r));
      const __m128i weights = _mm_set1_epi32(w << 16 | ((1 << kBits) - w));
      return _mm_madd_epi16(_mm_unpacklo_epi8(pairs, _mm_setzero_si128()), weights);
    };
    const __m128i top = line(above);
    const __m128 step = _mm_cvtepi32_ps(_mm_sub_epi32(line(below), top));
    const __m128 value = _mm_add_ps(_mm_cvtepi32_ps(top), _mm_mul_ps(step, _mm_set1_ps(dy)));
    __m128i levels = _mm_srli_epi32(_mm_cvttps_epi32(value), kBits);
    levels = _mm_packs_epi32(levels, levels);
    const int pixel = _mm_cvtsi128_si32(_mm_packus_epi16(levels, levels));
    std::memcpy(out, &pixel, 4);
#else
    for (size_t c = 0; c < 3; ++c) {
      const int top = above[left + c] * ((1 << kBits) - w) + above[right + c] * w;
      const int bottom = below[left + c] * ((1 << kBits) - w) + below[right + c] * w;
      const float value = static_cast<float>(top) + static_cast<float>(bottom - top) * dy;
      out[c] = static_cast<uint8_t>(static_cast<int>(value) >> kBits);
    }
    out[3] = 0;
#endif
  }
  void bicubic(Place at, uint8_t* out) const {
    const auto [x, dx] = split(at.x - 0.5);
    const auto [y, dy] = split(at.y - 0.5);
    size_t columns[4];
    const uint8_t* rows[4];
    for (int64_t i = 0; i < 4; ++i) {
      columns[i] = column(x - 1 + i);
      rows[i] = row(y - 1 + i);
    }
    Channels lines[4];
    for (size_t j = 0; j < 4; ++j) {
      Channels values[4];
      for (size_t i = 0; i < 4; ++i) values[i] = channels(rows[j] + columns[i]);
      lines[j] = cubic(values, dx);
    }
    const Channels value = cubic(lines, dy);
    for (int c = 0; c < 4; ++c) {
      out[c] = value[c] <= 0 ? 0 : value[c] >= 255 ? 255 : static_cast<uint8_t>(value[c]);
    }
  }

 private:
  static constexpr int kBits = 11;  // of the weight of a column

  // The whole number below a place that is at least -1, and the rest.
  static std::pair<int64_t, float> split(double at) {
    const int64_t low = static_cast<int64_t>(at + 1) - 1;
    return {low, static_cast<float>(at - static_cast<double>(low))};
  }
  size_t column(int64_t x) const {
    return static_cast<size_t>(std::clamp<int64_t>(x, 0, from_.width - 1)) * 4;
  }
  const uint8_t* row(int64_t y) const {
    return from_.row(std::clamp<int64_t>(y, 0, from_.height - 1));
  }
  const Surface& from_;
};

}  // namespace

void warp_values(const Warp& warp, const uint16_t* from, uint16_t* to, int64_t width,
                 int64_t height) {
  nearest_to(warp, width, height,
             [&](int64_t i, int64_t place) { to[i] = place < 0 ? warp.fill.mask : from[place]; });
}

void warp_pixels(const Warp& warp, const Surface& from, const Surface& to) {
  const uint8_t fill[4] = {warp.fill.rgb[0], warp.fill.rgb[1], warp.fill.rgb[2], 0};
  if (warp.interpolation == Interpolation::nearest) {
    nearest_to(warp, from.width, from.height, [&](int64_t i, int64_t place) {
      std::memcpy(to.pixels + 4 * i, place < 0 ? fill : from.pixels + 4 * place, 4);
    });
    return;
  }
  const Sampler sampler(from);
  const auto width = static_cast<double>(from.width), height = static_cast<double>(from.height);
  const bool cubic = warp.interpolation == Interpolation::bicubic;
  uint8_t* out = to.pixels;
  for (int64_t y = 0; y < to.height; ++y) {
    for (int64_t x = 0; x < to.width; ++x, out += 4) {
      const Place at =
          place_of(warp.to_source, static_cast<double>(x) + 0.5, static_cast<double>(y) + 0.5);
      if (!(at.x >= 0 && at.x < width && at.y >= 0 && at.y < height)) {
        std::memcpy(out, fill, 4);
      } else if (cubic) {
        sampler.bicubic(at, out);
      } else {
        sampler.bilinear(at, out);
      }
    }
  }
}

}  // namespace nostall::image
