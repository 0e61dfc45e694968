// Pillow's ImageEnhance, ImageOps and HSV conversion, and torchvision's Gaussian blur in fixed
// point.
#include "image/color.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "image/color_kernels.h"

namespace nostall::image {
namespace {

template <typename Change>
void each_pixel(const Surface& surface, const Change& change) {
  uint8_t* p = surface.pixels;
  for (uint8_t* end = p + surface.bytes(); p != end; p += 4) change(p);
}

struct Hsv {
  uint8_t h, s, v;
};

Hsv to_hsv(const uint8_t* p) {
  const int r = p[0], g = p[1], b = p[2];
  const int high = std::max({r, g, b}), low = std::min({r, g, b});
  if (high == low) return {0, 0, static_cast<uint8_t>(high)};
  const float range = static_cast<float>(high - low);
  const float s = range / static_cast<float>(high);
  const float rc = static_cast<float>(high - r) / range;
  const float gc = static_cast<float>(high - g) / range;
  const float bc = static_cast<float>(high - b) / range;
  float h = r == high   ? bc - gc
            : g == high ? static_cast<float>(2.0 + static_cast<double>(rc) - bc)
                        : static_cast<float>(4.0 + static_cast<double>(gc) - rc);
  const double turned = static_cast<double>(h) / 6.0 + 1.0;
  h = static_cast<float>(turned >= 1.0 ? turned - 1.0 : turned);
  return {static_cast<uint8_t>(std::clamp(static_cast<int>(h * 255.0), 0, 255)),
          static_cast<uint8_t>(std::clamp(static_cast<int>(s * 255.0), 0, 255)),
          static_cast<uint8_t>(high)};
}

// For each hue: the sector of the circle, and how far in it.
struct Sector {
  uint8_t sector;
  float part;
};
std::array<Sector, 256> sectors() {
  std::array<Sector, 256> all;
  for (size_t h = 0; h < 256; ++h) {
    const double turn = static_cast<double>(static_cast<float>(h) * 6.0) / 255.0;
    const int i = static_cast<int>(turn);
    all[h] = {static_cast<uint8_t>(i % 6), static_cast<float>(turn - static_cast<double>(i))};
  }
  return all;
}

void from_hsv(const Hsv& hsv, const Sector& sector, uint8_t* p) {
  if (hsv.s == 0) {
    p[0] = p[1] = p[2] = hsv.v;
    return;
  }
  const float v = hsv.v, fs = static_cast<float>(static_cast<double>(hsv.s) / 255.0);
  const auto level = [v](double part) {
    return static_cast<uint8_t>(static_cast<int>(static_cast<double>(v) * part + 0.5));
  };
  const uint8_t low = level(1.0 - fs), falling = level(1.0 - fs * sector.part);
  const uint8_t rising = level(1.0 - fs * (1.0 - static_cast<double>(sector.part)));
  const uint8_t rgb[6][3] = {{hsv.v, rising, low},  {falling, hsv.v, low}, {low, hsv.v, rising},
                             {low, falling, hsv.v}, {rising, low, hsv.v},  {hsv.v, low, falling}};
  std::memcpy(p, rgb[sector.sector], 3);
}

void turn_hue(const Surface& surface, double turns) {
  static const std::array<Sector, 256> kSectors = sectors();
  const auto shift = static_cast<uint8_t>(static_cast<int>(turns * 255));
  each_pixel(surface, [shift](uint8_t* p) {
    Hsv hsv = to_hsv(p);
    hsv.h = static_cast<uint8_t>(hsv.h + shift);
    from_hsv(hsv, kSectors[hsv.h], p);
  });
}

// ImageEnhance.Sharpness: blended with a smoothed copy, which has the edges of the original.
void sharpen(const Surface& surface, Buffer& other, float factor) {
  const size_t stride = surface.stride();
  if (surface.width < 3 || surface.height < 3) return;
  uint8_t* copy = other.reserve(surface.bytes());
  std::memcpy(copy, surface.pixels, surface.bytes());
  for (int64_t y = 1; y + 1 < surface.height; ++y) {
    const uint8_t* row = copy + static_cast<size_t>(y) * stride;
    sharpen_row(row - stride, row, row + stride, surface.row(y), stride - 8, factor);
  }
}

// torchvision's kernel, in 14 bits; sums to one, the same to both sides.
std::vector<int32_t> gaussian(uint32_t size, double sigma) {
  const uint32_t half = size / 2;
  const double step = 1 / (std::sqrt(2.0) * sigma);  // torchvision's places are so far apart
  std::vector<double> exact(half + 1);
  double total = 0;
  for (uint32_t k = 0; k <= half; ++k) {
    exact[k] = std::exp(-(k * step) * (k * step));
    total += k == 0 ? exact[k] : 2 * exact[k];
  }
  constexpr int32_t kOne = 1 << 14;
  std::vector<int32_t> weights(size);
  int32_t middle = kOne;
  for (uint32_t k = 1; k <= half; ++k) {
    const auto weight = static_cast<int32_t>(std::lround(exact[k] / total * kOne));
    weights[half - k] = weights[half + k] = weight;
    middle -= 2 * weight;
  }
  // What rounding has added to a flat kernel is taken from the sides: no weight may be negative.
  for (uint32_t k = half; k >= 1 && middle < 0; --k) {
    if (weights[half - k] == 0) continue;
    --weights[half - k];
    --weights[half + k];
    middle += 2;
  }
  weights[half] = middle;
  return weights;
}

int64_t reflected(int64_t i, int64_t size) {
  i = i < 0 ? -i : i;
  return i >= size ? 2 * size - 2 - i : i;
}

// Columns first, into 7 more bits a level, then rows.
void blur_rows(const Surface& surface, Buffer& other, const std::vector<int32_t>& across,
               const std::vector<int32_t>& down) {
  const auto half_x = static_cast<int64_t>(across.size() / 2);
  const auto half_y = static_cast<int64_t>(down.size() / 2);
  const size_t values = surface.stride(), margin = static_cast<size_t>(half_x) * 4;
  std::vector<int32_t> sums(values);
  // Each input row is needed until `half_y` rows below it are done.
  uint8_t* source = other.reserve(surface.bytes());
  std::memcpy(source, surface.pixels, surface.bytes());
  std::vector<uint16_t> line(values + 2 * margin);
  for (int64_t y = 0; y < surface.height; ++y) {
    std::fill(sums.begin(), sums.end(), 64);
    for (int64_t k = 0; k <= half_y; ++k) {
      const auto row = [&](int64_t at) {
        return source + static_cast<size_t>(reflected(at, surface.height)) * values;
      };
      const int32_t weight = down[static_cast<size_t>(half_y + k)];
      // The middle is counted twice by the sum of both sides; its weight is even.
      add_weighted(sums.data(), row(y - k), row(y + k), k == 0 ? weight / 2 : weight, values);
    }
    uint16_t* inner = line.data() + margin;
    for (size_t x = 0; x < values; ++x) inner[x] = static_cast<uint16_t>(sums[x] >> 7);
    for (int64_t x = 1; x <= half_x; ++x) {
      std::memcpy(inner - 4 * x, inner + 4 * x, 8);
      std::memcpy(inner + 4 * (surface.width - 1 + x), inner + 4 * (surface.width - 1 - x), 8);
    }
    std::fill(sums.begin(), sums.end(), 1 << 20);
    for (int64_t k = 0; k <= half_x; ++k) {
      const int32_t weight = across[static_cast<size_t>(half_x + k)];
      add_weighted(sums.data(), inner - 4 * k, inner + 4 * k, k == 0 ? weight / 2 : weight, values);
    }
    uint8_t* out = surface.row(y);
    for (size_t x = 0; x < values; ++x) out[x] = static_cast<uint8_t>(sums[x] >> 21);
  }
}

}  // namespace

Colors::Colors(const Surface& surface, Buffer& other) : surface_(surface), other_(other) {}

template <typename Level>
void Colors::then(const Level& level) {
  Table table;
  for (size_t v = 0; v < 256; ++v) table[v] = level(static_cast<int>(v));
  then({table, table, table});
}

void Colors::then(const std::array<Table, 3>& tables) {
  if (!pending_) {
    tables_ = tables;
  } else {
    for (size_t c = 0; c < 3; ++c) {
      for (uint8_t& level : tables_[c]) level = tables[c][level];
    }
  }
  pending_ = true;
}

void Colors::flush() {
  if (!pending_) return;
  pending_ = false;
  each_pixel(surface_, [this](uint8_t* p) {
    for (size_t c = 0; c < 3; ++c) p[c] = tables_[c][p[c]];
  });
}

std::array<std::array<uint32_t, 256>, 3> Colors::histogram() {
  flush();
  std::array<std::array<uint32_t, 256>, 3> counts{};
  each_pixel(surface_, [&counts](const uint8_t* p) {
    for (size_t c = 0; c < 3; ++c) ++counts[c][p[c]];
  });
  return counts;
}

void Colors::contrast(double factor) {
  flush();
  const size_t pixels = surface_.bytes() / 4;
  const auto sum = static_cast<double>(sum_grey(surface_.pixels, pixels));
  const int mean = static_cast<int>(sum / static_cast<double>(pixels) + 0.5);
  then([&](int v) { return blend(mean, v, static_cast<float>(factor)); });
}

void Colors::autocontrast() {
  std::array<Table, 3> tables;
  const auto counts = histogram();
  for (size_t c = 0; c < 3; ++c) {
    int low = 0, high = 255;
    while (low < 255 && counts[c][static_cast<size_t>(low)] == 0) ++low;
    while (high > 0 && counts[c][static_cast<size_t>(high)] == 0) --high;
    const double scale = 255.0 / std::max(1, high - low), offset = -low * scale;
    for (int v = 0; v < 256; ++v) {
      const int level = high <= low ? v : static_cast<int>(v * scale + offset);
      tables[c][static_cast<size_t>(v)] = static_cast<uint8_t>(std::clamp(level, 0, 255));
    }
  }
  then(tables);
}

void Colors::equalize() {
  std::array<Table, 3> tables;
  const auto counts = histogram();
  for (size_t c = 0; c < 3; ++c) {
    uint64_t total = 0;
    uint32_t last = 0;
    for (const uint32_t count : counts[c]) {
      total += count;
      if (count != 0) last = count;
    }
    const uint64_t step = (total - last) / 255;
    uint64_t sum = step / 2;
    for (size_t v = 0; v < 256; ++v) {
      tables[c][v] = static_cast<uint8_t>(step == 0 ? v : std::min<uint64_t>(255, sum / step));
      sum += counts[c][v];
    }
  }
  then(tables);
}

void Colors::apply(const Color& action) {
  const auto factor = static_cast<float>(action.amount);
  switch (action.tone) {
    case Tone::brightness:
      return then([factor](int v) { return blend(0, v, factor); });
    case Tone::solarize:
      return then([&](int v) { return static_cast<uint8_t>(v < action.amount ? v : 255 - v); });
    case Tone::posterize:
      return then([&](int v) {
        return static_cast<uint8_t>(v & ~((1 << (8 - static_cast<int>(action.amount))) - 1));
      });
    case Tone::invert:
      return then([](int v) { return static_cast<uint8_t>(255 - v); });
    case Tone::contrast:
      return contrast(action.amount);
    case Tone::autocontrast:
      return autocontrast();
    case Tone::equalize:
      return equalize();
    default:
      break;
  }
  flush();
  switch (action.tone) {
    case Tone::saturation:
      return saturate(surface_.pixels, surface_.bytes() / 4, factor);
    case Tone::hue:
      return turn_hue(surface_, action.amount);
    case Tone::sharpness:
      return sharpen(surface_, other_, factor);
    default:  // greyscale
      return saturate(surface_.pixels, surface_.bytes() / 4, 0);
  }
}

void Colors::apply(const Blur& action) {
  flush();
  blur_rows(surface_, other_, gaussian(action.kernel[0], action.sigma),
            gaussian(action.kernel[1], action.sigma));
}

}  // namespace nostall::image
