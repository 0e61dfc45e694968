// One block of all images after the other, so that a partner is in the cache when it is mixed.
#include "image/mix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "base/half.h"

namespace nostall::image {
namespace {

constexpr uint64_t kOfBatches = 0x4d69784261746368u;  // "MixBatch": other draws than of samples
constexpr size_t kBlock = 16384;

// In (0, 1).
double open_uniform(SampleRandom& random) { return (random.next() + 0.5) * 0x1p-32; }

// A draw from Beta(a, a): Joehnk's method up to 1, in logarithms for what is close to 0, Cheng's BB
// above.
double symmetric_beta(double a, SampleRandom& random) {
  if (a <= 1) {
    for (;;) {
      const double x = std::log(open_uniform(random)) / a, y = std::log(open_uniform(random)) / a;
      const double most = std::max(x, y);
      const double sum = most + std::log(std::exp(x - most) + std::exp(y - most));
      if (sum <= 0) return std::exp(x - sum);
    }
  }
  const double both = 2 * a, beta = std::sqrt((both - 2) / (both * a - both));
  const double gamma = a + 1 / beta;
  for (;;) {
    const double u = open_uniform(random), v = open_uniform(random);
    const double t = beta * std::log(u / (1 - u)), w = a * std::exp(t);
    const double z = std::log(u * u * v), r = gamma * t - std::log(4.0);
    if (r + both * std::log(both / (a + w)) >= z) return w / (a + w);
  }
}

// Calls mix(image's bytes, partner's bytes, size) for `bytes` bytes from `begin` on of each image, the
// partner's being those before it was mixed. `shift` is below `samples`.
template <typename Mix>
void around(std::byte* images, size_t image_bytes, uint64_t samples, uint64_t shift, size_t begin,
            size_t bytes, const Mix& mix) {
  alignas(64) std::byte held[kBlock];
  const uint64_t cycles = std::gcd(samples, shift);
  for (size_t end = begin + bytes; begin < end;) {
    const size_t size = std::min(kBlock, end - begin);
    const auto at = [&](uint64_t image) { return images + image * image_bytes + begin; };
    for (uint64_t first = 0; first < cycles; ++first) {
      std::memcpy(held, at(first), size);
      uint64_t image = first;
      for (;;) {
        const uint64_t partner = image >= shift ? image - shift : image + samples - shift;
        if (partner == first) break;
        mix(at(image), at(partner), size);
        image = partner;
      }
      mix(at(image), held, size);
    }
    begin += size;
  }
}

// Rounded as torch's roll(shift, 0).mul_(1 - lam).add_(images.mul(lam)).
struct Weighted {
  float lam, rest;
  Type type;

  void operator()(std::byte* image, const std::byte* partner, size_t size) const {
    if (type == Type::float32) {
      auto* to = reinterpret_cast<float*>(image);
      const auto* from = reinterpret_cast<const float*>(partner);
      for (size_t i = 0; i < size / 4; ++i) to[i] = from[i] * rest + to[i] * lam;
    } else if (type == Type::float16) {
      auto* to = reinterpret_cast<uint16_t*>(image);
      const auto* from = reinterpret_cast<const uint16_t*>(partner);
      for (size_t i = 0; i < size / 2; ++i) {
        const float one = float_of(half_of(float_of(from[i]) * rest));
        to[i] = half_of(one + float_of(half_of(float_of(to[i]) * lam)));
      }
    } else {
      auto* to = reinterpret_cast<uint8_t*>(image);
      const auto* from = reinterpret_cast<const uint8_t*>(partner);
      for (size_t i = 0; i < size; ++i) {
        to[i] = static_cast<uint8_t>(from[i] * rest + to[i] * lam + 0.5f);
      }
    }
  }
};

size_t size_of(Type type) { return type == Type::uint8 ? 1 : type == Type::float16 ? 2 : 4; }

}  // namespace

void validate(const Mixing& mixing) {
  double weights = 0;
  for (const Mixer& mixer : mixing.mixers) {
    if (!(mixer.alpha > 0 && mixer.alpha <= 1e6)) {
      throw Error(ErrorKind::usage, "alpha " + std::to_string(mixer.alpha) +
                                        " must be a number above 0, at most 1,000,000");
    }
    if (!(mixer.weight >= 0 && std::isfinite(mixer.weight))) weights = -1;
    if (weights >= 0) weights += mixer.weight;
  }
  if (!(weights > 0)) {
    throw Error(ErrorKind::usage,
                "of what batches are mixed by, no weight may be negative, and one "
                "must be above 0");
  }
  if (!(mixing.p >= 0 && mixing.p <= 1)) {
    throw Error(ErrorKind::usage, "p = " + std::to_string(mixing.p) + ": must be from 0 to 1");
  }
  if (mixing.shift == 0) throw Error(ErrorKind::usage, "an image cannot be mixed with itself");
}

Mixture draw_mixture(const Mixing& mixing, int64_t width, int64_t height, uint64_t seed,
                     uint32_t epoch, uint64_t batch) {
  SampleRandom random(seed ^ kOfBatches, epoch, batch);
  double weights = 0;
  for (const Mixer& mixer : mixing.mixers) weights += mixer.weight;
  double place = random.uniform() * weights;
  const Mixer* chosen = nullptr;
  for (const Mixer& mixer : mixing.mixers) {
    if (mixer.weight > 0 && place >= 0) chosen = &mixer;
    place -= mixer.weight;
  }
  const bool wanted = random.uniform() < mixing.p;
  const auto below = [&random](int64_t bound) {
    return static_cast<int64_t>((uint64_t{random.next()} * static_cast<uint64_t>(bound)) >> 32);
  };
  const int64_t x = below(width), y = below(height);
  Mixture mixture;
  if (!wanted || chosen == nullptr) return mixture;
  const double lam = static_cast<float>(symmetric_beta(chosen->alpha, random));
  if (chosen->kind == Mixer::Kind::mixup) return {Mixture::Kind::mixup, lam, {}};
  const double r = 0.5 * std::sqrt(1 - lam);
  const auto half_width = static_cast<int64_t>(r * static_cast<double>(width));
  const auto half_height = static_cast<int64_t>(r * static_cast<double>(height));
  Box& box = mixture.box;
  box.x = std::max<int64_t>(x - half_width, 0);
  box.y = std::max<int64_t>(y - half_height, 0);
  box.width = std::min(x + half_width, width) - box.x;
  box.height = std::min(y + half_height, height) - box.y;
  const double area = static_cast<double>(width) * static_cast<double>(height);
  mixture.kind = Mixture::Kind::cutmix;
  mixture.lam = static_cast<float>(1 - static_cast<double>(box.width * box.height) / area);
  return mixture;
}

void mix_images(const Mixture& mixture, uint32_t shift, const Output& output, std::byte* images,
                uint64_t samples) {
  const uint64_t places = samples == 0 ? 0 : shift % samples;
  if (places == 0 || mixture.kind == Mixture::Kind::none) return;
  const size_t bytes = output.bytes(), value = size_of(output.type);
  if (mixture.kind == Mixture::Kind::mixup) {
    const Weighted mix{static_cast<float>(mixture.lam), static_cast<float>(1 - mixture.lam),
                       output.type};
    return around(images, bytes, samples, places, 0, bytes, mix);
  }
  const Box& box = mixture.box;
  const bool planes = output.layout == Layout::chw;
  const size_t pixel = planes ? value : 3 * value;
  const auto width = static_cast<size_t>(output.width), height = static_cast<size_t>(output.height);
  const auto copy = [](std::byte* image, const std::byte* partner, size_t size) {
    std::memcpy(image, partner, size);
  };
  for (size_t plane = 0; plane < (planes ? 3u : 1u); ++plane) {
    for (int64_t y = box.y; y < box.y + box.height; ++y) {
      const size_t row = plane * height + static_cast<size_t>(y);
      around(images, bytes, samples, places, (row * width + static_cast<size_t>(box.x)) * pixel,
             static_cast<size_t>(box.width) * pixel, copy);
    }
  }
}

void mix_labels(const Mixture& mixture, uint32_t shift, std::span<const int64_t> labels,
                uint32_t classes, float* targets) {
  const auto lam = static_cast<float>(mixture.lam), rest = static_cast<float>(1 - mixture.lam);
  const size_t n = labels.size();
  std::fill_n(targets, n * classes, 0.0f);
  for (size_t i = 0; i < n; ++i) {
    float* row = targets + i * classes;
    row[labels[(i + n - shift % n) % n]] = rest;
    row[labels[i]] += lam;
  }
}

}  // namespace nostall::image
