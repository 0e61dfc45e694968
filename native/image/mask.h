// image/mask.h - masks: decoded to values of 16 bits, moved with nearest pixels, stored as asked.
// Thread-safety: functions of their arguments.
#pragma once

#include <variant>
#include <vector>

#include "image/bitmap.h"
#include "image/draw.h"
#include "image/targets.h"

namespace nostall::image {

struct MaskValues {
  const uint16_t* values = nullptr;  // in the buffer that it was decoded into
  int64_t width = 0, height = 0;
};

// Memory for both, kept from mask to mask.
struct MaskBuffers {
  explicit MaskBuffers(HeldBytes* counted)
      : encoded(counted), decoded(counted), moved{Buffer(counted), Buffer(counted)} {}
  Buffer encoded, decoded, moved[2];
  std::vector<int64_t> columns, rows, other;
};

// A PNG of grey or palette, or pixels as the mask says. Any bytes give values or an Error of kind
// corruption.
Result<MaskValues> decode_mask(const Mask& mask, uint64_t max_pixels, MaskBuffers& buffers);

// What the drawing makes of a mask, into its place.
Result<std::monostate> move_mask(const MaskValues& values, const Drawing& drawing, const Mask& mask,
                                 uint64_t max_pixels, MaskBuffers& buffers);

}  // namespace nostall::image
