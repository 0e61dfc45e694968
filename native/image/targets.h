// image/targets.h - a sample of several pictures, boxes and points, transformed as one. For the
// caller of Pipeline::apply_record.
//
// The steps are drawn once for a sample, and each part gets what concerns it: images everything,
// masks, boxes and keypoints the geometry alone. All pictures of a sample must have one size, the
// canvas. The rules are those of torchvision.transforms.v2:
//
//   masks      nearest resampling: every value is one of the input's, or the fill (0). PNG, grey of
//              1 to 16 bits or palette: the values as they are stored (labels.h).
//   boxes      crops, pads, rotations and perspective clamp them to the canvas, and make upright
//              boxes of turned ones. None is removed but by SanitizeBoundingBoxes; a box that ends
//              outside the canvas is then empty (width or height 0). A coordinate that is NaN or
//              infinite is an error, and so is a negative size, and a place that a perspective leaves
//              undefined, unless SanitizeBoundingBoxes removes the box.
//   keypoints  never clamped, never removed. A third column is a visibility: it becomes 0 for a
//              point that is not on the final canvas, and is copied else.
//
// Example: an image, its mask and its boxes.
//   Picture image{jpeg, image_place};
//   Mask mask{png, MaskType::int64, mask_place};
//   Boxes boxes{xyxy, BoxFormat::xyxy, false, boxes_place, rows_place};
//   auto size = pipeline.apply_record({{&image, 1}, {&mask, 1}, {&boxes, 1}, {}}, key, scratch);
//   if (size) use(boxes.count, boxes.kept);
//
// Thread-safety: values; a Record is used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "image/pixels.h"

namespace nostall::image {

struct Picture {
  std::span<const std::byte> encoded;
  std::span<std::byte> out;      // Output::bytes()
  std::optional<Pixels> pixels;  // absent: Options::pixels, or an encoded image
};

enum class MaskType : uint8_t { uint8, uint16, int16, int32, int64, float32 };
size_t size_of(MaskType type) noexcept;

// A mask that is no PNG: `height` rows of `width` unsigned values, little-endian.
struct MaskPixels {
  uint32_t height = 0, width = 0;
  uint32_t bytes = 1;  // of a value: 1 or 2
};

struct Mask {
  std::span<const std::byte> encoded;
  MaskType type = MaskType::uint8;  // a value that it cannot hold is an error
  std::span<std::byte> out;         // Output height * width values of `type`
  std::optional<MaskPixels> pixels;
};

enum class BoxFormat : uint8_t { xyxy, xywh, cxcywh };

struct Boxes {
  std::span<const float> rows;  // 4 values a box
  BoxFormat format = BoxFormat::xyxy;
  bool normalised = false;   // coordinates are parts of width and height, in and out
  std::span<float> out;      // at least as long as `rows`
  std::span<uint32_t> kept;  // at least one for each box, or empty: not wanted
  // Set: the boxes in `out`; kept[i] is the row of the input that box i was.
  size_t count = 0;
};

struct Keypoints {
  std::span<const float> rows;
  uint32_t columns = 2;  // 3: with a visibility
  bool normalised = false;
  std::span<float> out;  // as long as `rows`
};

struct Record {
  std::span<const Picture> images;
  std::span<const Mask> masks;
  std::span<Boxes> boxes;
  std::span<const Keypoints> keypoints;
};

}  // namespace nostall::image
