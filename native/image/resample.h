// image/resample.h - bilinear and bicubic resampling, Pillow's: two passes, horizontal first, 8
// bits in between, a filter as wide as the ratio when shrinking.
//
// Coefficients are 15-bit fixed-point numbers that sum to one exactly; results differ from Pillow's
// by at most one level, bicubic ones by two. Pillow 13 takes columns first where the height shrinks
// much more than the width. The AVX2 and the portable kernels agree bit for bit.
// Thread-safety: functions of their arguments.
#pragma once

#include <cstdint>
#include <vector>

#include "image/bitmap.h"

namespace nostall::image {

// Which curve weighs the inputs. Without `antialias` it is as wide as when enlarging, and inputs
// beyond the edge are the edge's, as torch's interpolate(antialias=False) has it.
struct Curve {
  bool cubic = false;
  bool antialias = true;
};

// The filter of one axis: result i is the sum of `taps` inputs from first[i], weighted by
// weights[i * taps ...]. `taps` is a multiple of 4; weights beyond count[i] are zero.
struct Filter {
  int32_t taps = 0;
  std::vector<int32_t> first, count;
  std::vector<int16_t> weights;
  bool identity = false;  // result i is input first[i]

  // Results [window_begin, window_begin + results) of resizing the inputs between `low` and `high`,
  // which need not be whole, to `full` results. There are inputs
  // [origin, origin + available), among them all that the window needs; `first` counts from origin.
  void prepare(double low, double high, int64_t full, int64_t window_begin, int64_t results,
               int64_t origin, int64_t available, Curve curve = {});

 private:
  // Rounds the exact weights of a result, so that they sum to one.
  void store(size_t result, int32_t n, double total);

  std::vector<double> exact_;
};

struct Kernels {
  const char* name;
  // One or two rows of 4-byte pixels through `filter` (b, out_b may repeat a, out_a).
  void (*horizontal)(const Filter& filter, const uint8_t* a, const uint8_t* b, uint8_t* out_a,
                     uint8_t* out_b);
  // `bytes` bytes of the sum of `taps` rows, one weight each; reads and writes up to a multiple of
  // 32 bytes.
  void (*vertical)(const uint8_t* const* rows, const int16_t* weights, int32_t taps, uint8_t* out,
                   size_t bytes);
  // A row of `width` pixels to three planes: out[c][x] = pixel[c] * scale[c] + offset[c].
  void (*planes_f32)(const uint8_t* row, int64_t width, bool mirror, const float* scale,
                     const float* offset, float* const* out);
};

const Kernels& portable_kernels() noexcept;
// The best of this machine, chosen once.
const Kernels& kernels() noexcept;

}  // namespace nostall::image
