// Pillow's antialiased filters in fixed point. A Filter has, per output position, the first
// input and its weights; a resize applies one to rows and one to columns. The kernels exist in
// portable code and for AVX2, and give the same bits.
#include "image/resample.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/processor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nostall::image {
namespace {

constexpr int kBits = 14;
constexpr int32_t kOne = 1 << kBits, kHalf = kOne / 2;

uint8_t clip(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kBits, 0, 255)); }

void horizontal_row(const Filter& filter, const uint8_t* row, uint8_t* out) {
  const int16_t* weights = filter.weights.data();
  for (size_t i = 0; i < filter.first.size(); ++i, weights += filter.taps, out += 4) {
    int32_t sum[3] = {kHalf, kHalf, kHalf};
    const uint8_t* pixel = row + size_t{4} * static_cast<size_t>(filter.first[i]);
    for (int32_t tap = 0; tap < filter.count[i]; ++tap, pixel += 4) {
      for (int c = 0; c < 3; ++c) sum[c] += pixel[c] * weights[tap];
    }
    for (int c = 0; c < 3; ++c) out[c] = clip(sum[c]);
    out[3] = 0;
  }
}

void horizontal(const Filter& filter, const uint8_t* a, const uint8_t* b, uint8_t* out_a,
                uint8_t* out_b) {
  horizontal_row(filter, a, out_a);
  if (b != a) horizontal_row(filter, b, out_b);
}

void vertical(const uint8_t* const* rows, const int16_t* weights, int32_t taps, uint8_t* out,
              size_t bytes) {
  for (size_t x = 0; x < bytes; ++x) {
    int32_t sum = kHalf;
    for (int32_t tap = 0; tap < taps; ++tap) sum += rows[tap][x] * weights[tap];
    out[x] = clip(sum);
  }
}

void planes_f32(const uint8_t* row, int64_t width, bool mirror, const float* scale,
                const float* offset, float* const* out) {
  for (int c = 0; c < 3; ++c) {
    for (int64_t x = 0; x < width; ++x) {
      const float value = static_cast<float>(row[4 * x + c]) * scale[c];
      out[c][mirror ? width - 1 - x : x] = value + offset[c];
    }
  }
}

#if defined(__x86_64__)
#define NOSTALL_AVX2 __attribute__((target("avx2")))

// Two rows at once, one in each half of the registers; four taps a step. The shuffle pairs the
// same channel of neighbouring pixels, as 16 bits, for the multiply-add of pairs.
NOSTALL_AVX2 void horizontal_avx2(const Filter& filter, const uint8_t* a, const uint8_t* b,
                                  uint8_t* out_a, uint8_t* out_b) {
  const __m256i pair01 = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, -1, -1, -1, -1));
  const __m256i pair23 = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(8, -1, 12, -1, 9, -1, 13, -1, 10, -1, 14, -1, -1, -1, -1, -1));
  const int16_t* weights = filter.weights.data();
  const int32_t taps = filter.taps;
  const size_t results = filter.first.size();
  for (size_t i = 0; i < results; ++i) {
    const size_t at = size_t{4} * static_cast<size_t>(filter.first[i]);
    __m256i sum = _mm256_set1_epi32(kHalf);
    for (int32_t tap = 0; tap < taps; tap += 4, weights += 4) {
      const size_t from = at + size_t{4} * static_cast<size_t>(tap);
      const __m256i pixels = _mm256_inserti128_si256(
          _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + from))),
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + from)), 1);
      int32_t w01, w23;
      std::memcpy(&w01, weights, sizeof w01);
      std::memcpy(&w23, weights + 2, sizeof w23);
      sum = _mm256_add_epi32(
          sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, pair01), _mm256_set1_epi32(w01)));
      sum = _mm256_add_epi32(
          sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, pair23), _mm256_set1_epi32(w23)));
    }
    sum = _mm256_srai_epi32(sum, kBits);
    sum = _mm256_packs_epi32(sum, sum);
    sum = _mm256_packus_epi16(sum, sum);
    const int32_t pixel_a = _mm256_extract_epi32(sum, 0), pixel_b = _mm256_extract_epi32(sum, 4);
    std::memcpy(out_a + 4 * i, &pixel_a, 4);
    std::memcpy(out_b + 4 * i, &pixel_b, 4);
  }
}

NOSTALL_AVX2 void vertical_avx2(const uint8_t* const* rows, const int16_t* weights, int32_t taps,
                                uint8_t* out, size_t bytes) {
  const __m256i zero = _mm256_setzero_si256();
  for (size_t x = 0; x < bytes; x += 32) {
    __m256i s0 = _mm256_set1_epi32(kHalf), s1 = s0, s2 = s0, s3 = s0;
    for (int32_t tap = 0; tap < taps; tap += 2) {
      const __m256i p = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[tap] + x));
      const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[tap + 1] + x));
      int32_t pair;
      std::memcpy(&pair, weights + tap, sizeof pair);
      const __m256i w = _mm256_set1_epi32(pair);
      const __m256i low = _mm256_unpacklo_epi8(p, q), high = _mm256_unpackhi_epi8(p, q);
      s0 = _mm256_add_epi32(s0, _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), w));
      s1 = _mm256_add_epi32(s1, _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), w));
      s2 = _mm256_add_epi32(s2, _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), w));
      s3 = _mm256_add_epi32(s3, _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), w));
    }
    const __m256i first =
        _mm256_packs_epi32(_mm256_srai_epi32(s0, kBits), _mm256_srai_epi32(s1, kBits));
    const __m256i second =
        _mm256_packs_epi32(_mm256_srai_epi32(s2, kBits), _mm256_srai_epi32(s3, kBits));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + x), _mm256_packus_epi16(first, second));
  }
}

NOSTALL_AVX2 void planes_f32_avx2(const uint8_t* row, int64_t width, bool mirror,
                                  const float* scale, const float* offset, float* const* out) {
  const __m256i byte = _mm256_set1_epi32(0xff);
  const __m256i order = mirror ? _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0)
                               : _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  int64_t x = 0;
  for (; x + 8 <= width; x += 8) {
    const __m256i pixels = _mm256_permutevar8x32_epi32(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 4 * x)), order);
    const int64_t to = mirror ? width - 8 - x : x;
    for (int c = 0; c < 3; ++c) {
      const __m256 value =
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(pixels, 8 * c), byte));
      _mm256_storeu_ps(out[c] + to, _mm256_add_ps(_mm256_mul_ps(value, _mm256_set1_ps(scale[c])),
                                                  _mm256_set1_ps(offset[c])));
    }
  }
  for (; x < width; ++x) {
    for (int c = 0; c < 3; ++c) {
      const float value = static_cast<float>(row[4 * x + c]) * scale[c];
      out[c][mirror ? width - 1 - x : x] = value + offset[c];
    }
  }
}
#endif

double weight_of(Curve curve, double distance) {
  const double x = std::abs(distance);
  if (!curve.cubic) return std::max(0.0, 1.0 - x);
  const double a = curve.antialias ? -0.5 : -0.75;  // Pillow's, torch's
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0.0;
}

constexpr Kernels kPortable{"portable", horizontal, vertical, planes_f32};

}  // namespace

void Filter::prepare(double low, double high, int64_t full, int64_t window_begin, int64_t results,
                     int64_t origin, int64_t available, Curve curve) {
  const double scale = (high - low) / static_cast<double>(full);
  const double stretch = curve.antialias ? std::max(1.0, scale) : 1.0;
  const double support = (curve.cubic ? 2 : 1) * stretch;
  const auto floor_low = std::max(origin, static_cast<int64_t>(std::floor(low)));
  const auto ceil_high = std::min(origin + available, static_cast<int64_t>(std::ceil(high)));
  const auto widest = static_cast<int32_t>(std::ceil(support)) * 2 + 1;
  taps = std::min<int32_t>(widest, static_cast<int32_t>(ceil_high - floor_low));
  taps = (taps + 3) / 4 * 4;
  identity = scale == 1.0 && low == std::floor(low);

  first.assign(static_cast<size_t>(results), 0);
  count.assign(static_cast<size_t>(results), 1);
  weights.assign(static_cast<size_t>(results) * static_cast<size_t>(taps), 0);
  if (identity) {
    for (int64_t i = 0; i < results; ++i) {
      const auto result = static_cast<size_t>(i);
      first[result] = static_cast<int32_t>(static_cast<int64_t>(low) + window_begin + i - origin);
      weights[result * static_cast<size_t>(taps)] = kOne;
    }
    return;
  }
  exact_.resize(static_cast<size_t>(taps));
  for (int64_t i = 0; i < results; ++i) {
    const double center = low + (static_cast<double>(window_begin + i) + 0.5) * scale;
    const auto reach_low = static_cast<int64_t>(std::floor(center - support + 0.5));
    const auto reach_high = static_cast<int64_t>(std::floor(center + support + 0.5));
    int64_t begin = std::max(floor_low, reach_low);
    const int64_t end = std::max(begin + 1, std::min(ceil_high, reach_high));
    // Kernels read `taps` inputs: near the end they start earlier, with weights of zero.
    begin = std::max(floor_low, std::min(begin, ceil_high - taps));
    double total = 0;
    const auto weigh = [&](int64_t from, int64_t at) {
      const double weight = weight_of(curve, (static_cast<double>(from) - center + 0.5) / stretch);
      exact_[static_cast<size_t>(at - begin)] += weight;
      total += weight;
    };
    std::fill(exact_.begin(), exact_.end(), 0.0);
    if (curve.antialias) {
      for (int64_t j = begin; j < end; ++j) weigh(j, j);
    } else {
      for (int64_t j = reach_low; j < reach_high; ++j) weigh(j, std::clamp(j, begin, end - 1));
    }
    store(static_cast<size_t>(i), static_cast<int32_t>(end - begin), total);
    first[static_cast<size_t>(i)] = static_cast<int32_t>(begin - origin);
  }
}

void Filter::store(size_t result, int32_t n, double total) {
  int16_t* rounded = &weights[result * static_cast<size_t>(taps)];
  int32_t rest = kOne, largest = 0;
  for (int32_t j = 0; j < n; ++j) {
    rounded[j] = static_cast<int16_t>(std::lround(exact_[static_cast<size_t>(j)] / total * kOne));
    rest -= rounded[j];
    if (rounded[j] > rounded[largest]) largest = j;
  }
  rounded[largest] = static_cast<int16_t>(rounded[largest] + rest);
  count[result] = n;
}

const Kernels& portable_kernels() noexcept { return kPortable; }

const Kernels& kernels() noexcept {
#if defined(__x86_64__)
  static constexpr Kernels kAvx2{"AVX2", horizontal_avx2, vertical_avx2, planes_f32_avx2};
  if (processor().avx2) return kAvx2;
#endif
  return kPortable;
}

}  // namespace nostall::image
