// Conversion, normalisation and layout of a row at a time, and the boxes that are erased.
#include "image/finish.h"

#include <cmath>
#include <cstring>
#include <numbers>

#include "base/half.h"
#include "base/random.h"
#include "image/resample.h"

namespace nostall::image {
namespace {

// A normal number, a function of its place and key.
float noise_at(const std::array<uint32_t, 2>& key, uint64_t place) {
  const auto draws = philox4x32(
      {static_cast<uint32_t>(place), static_cast<uint32_t>(place >> 32), 0x6e6f6973u, 0}, key);
  const double u = (draws[0] + 1.0) * 0x1p-32, v = draws[1] * 0x1p-32;
  return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
}

void put(const Output& output, std::byte* out, int64_t place, float value) {
  if (output.type == Type::float32) {
    std::memcpy(out + place * 4, &value, 4);
  } else {
    const uint16_t half = half_of(value);
    std::memcpy(out + place * 2, &half, 2);
  }
}

}  // namespace

void store_row(const Pipeline::Impl& pipeline, int64_t y, const uint8_t* row, bool mirror_x,
               bool mirror_y, Buffer& line, std::byte* out) {
  const Output& output = pipeline.output;
  const auto &scale = pipeline.finish.scale, &offset = pipeline.finish.offset;
  const int64_t width = output.width, height = output.height;
  const int64_t to = mirror_y ? height - 1 - y : y;
  const bool mirror = mirror_x, chw = output.layout == Layout::chw;
  const auto place = [&](int c, int64_t x) {  // of one value, in values
    return chw ? (c * height + to) * width + x : (to * width + x) * 3 + c;
  };
  if (output.type == Type::uint8) {
    auto* bytes = reinterpret_cast<uint8_t*>(out);
    for (int64_t x = 0; x < width; ++x) {
      const uint8_t* pixel = row + 4 * (mirror ? width - 1 - x : x);
      for (int c = 0; c < 3; ++c) bytes[place(c, x)] = pixel[c];
    }
    return;
  }
  float* planes[3];
  if (output.type == Type::float32 && chw) {
    for (int c = 0; c < 3; ++c) planes[c] = reinterpret_cast<float*>(out) + place(c, 0);
    kernels().planes_f32(row, width, mirror, scale.data(), offset.data(), planes);
    return;
  }
  auto* values = reinterpret_cast<float*>(line.reserve(static_cast<size_t>(width) * 12));
  for (int c = 0; c < 3; ++c) planes[c] = values + c * width;
  kernels().planes_f32(row, width, mirror, scale.data(), offset.data(), planes);
  for (int c = 0; c < 3; ++c) {
    for (int64_t x = 0; x < width; ++x) {
      const float value = planes[c][x];
      if (output.type == Type::float32) {
        std::memcpy(out + place(c, x) * 4, &value, 4);
      } else {
        const uint16_t half = half_of(value);
        std::memcpy(out + place(c, x) * 2, &half, 2);
      }
    }
  }
}

void erase(const Pipeline::Impl& pipeline, const Erase& action, std::byte* out) {
  const Output& output = pipeline.output;
  const RandomErasing& step = pipeline.erasing[action.step];
  const Affinity3& after = pipeline.erased[action.step];
  const Box& box = action.box;
  const int64_t width = output.width, height = output.height;
  for (int64_t c = 0; c < 3; ++c) {
    const auto channel = static_cast<size_t>(c);
    for (int64_t y = box.y; y < box.y + box.height; ++y) {
      for (int64_t x = box.x; x < box.x + box.width; ++x) {
        const auto place =
            static_cast<uint64_t>((c * box.height + y - box.y) * box.width + x - box.x);
        const float value = step.noise ? noise_at(action.key, place) : step.value[channel];
        const int64_t at =
            output.layout == Layout::chw ? (c * height + y) * width + x : (y * width + x) * 3 + c;
        put(output, out, at, value * after.scale[channel] + after.offset[channel]);
      }
    }
  }
}

}  // namespace nostall::image
