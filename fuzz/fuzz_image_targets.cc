// Any mask, boxes and keypoints go through random steps of every kind without harm. The first 16
// bytes pick the steps, the sample and where the parts end.
#include <algorithm>
#include <cstring>
#include <vector>

#include "image/pipeline.h"

namespace {

using namespace nostall::image;

const std::vector<Step>& choices() {
  static const std::vector<Step> all{
      RandomHorizontalFlip{},
      RandomVerticalFlip{},
      Resize{20, 0},
      Resize{30, 11, Interpolation::bicubic, false},
      Resize{9, 31, Interpolation::nearest},
      CenterCrop{25, 40},
      RandomResizedCrop{16, 24, {0.01, 1.0}},
      Pad{{1, 2, 3, 4}, PadMode::reflect, {}},
      Pad{{5, 0, 7, 1}, PadMode::constant, {{1, 2, 3}, 4}},
      RandomCrop{12, 18, {2, 2, 2, 2}, true, PadMode::constant, {}},
      RandomRotation{{-180, 180}, Interpolation::nearest, {}, {}},
      RandomAffine{
          {-90, 90}, {1, 1}, {0.01, 100}, {-80, 80, -80, 80}, Interpolation::bilinear, {}, {}},
      RandomPerspective{1, 1, Interpolation::bicubic, {}},
      ColorJitter{{{0, 9}}, {{0, 9}}, {{0, 9}}, {{-0.5, 0.5}}},
      GaussianBlur{{5, 9}, {0.001, 50}},
      RandomAdjustSharpness{100, 1},
      RandAugment{4, 30, 31, Interpolation::nearest, {}},
      AutoAugment{},
      ClampBoundingBoxes{},
      SanitizeBoundingBoxes{},
  };
  return all;
}

std::vector<float> floats(std::span<const uint8_t> bytes, size_t multiple) {
  std::vector<float> values(bytes.size() / sizeof(float) / multiple * multiple);
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Scratch scratch;
  if (size < 16) return 0;
  std::vector<Step> steps;
  for (size_t i = 0; i < 6; ++i) steps.push_back(choices()[data[i] % choices().size()]);
  steps.push_back(CenterCrop{14, 19});
  Options options;
  options.max_pixels = 1 << 16;
  const Pipeline pipeline = Pipeline::compile(steps, options);

  const std::span<const uint8_t> rest(data + 16, size - 16);
  const size_t numbers = std::min<size_t>(rest.size(), data[6]);
  const std::vector<float> rows = floats(rest.first(numbers), 12);
  std::vector<float> box_places(rows.size()), point_places(rows.size());
  std::vector<uint32_t> kept(rows.size() / 4);
  std::vector<std::byte> mask_place(14 * 19 * 8), image_place(pipeline.output().bytes());

  Boxes boxes{rows, static_cast<BoxFormat>(data[7] % 3), data[8] % 2 == 1, box_places, kept};
  const Keypoints points{rows, data[9] % 2 + 2u, data[8] % 2 == 1, point_places};
  Mask mask{std::as_bytes(rest.subspan(numbers)), MaskType::int64, mask_place, {}};
  if (data[10] % 2 == 1) mask.pixels = MaskPixels{data[11], data[12], 1};
  const Picture picture{mask.encoded, image_place,
                        Pixels{data[11], data[12], 1, data[13] % 2 == 1, false}};
  const bool pictured = mask.pixels && data[11] != 0 && data[12] != 0;
  const auto done = pipeline.apply_record(
      {{&picture, pictured ? size_t{1} : 0}, {&mask, 1}, {&boxes, 1}, {&points, 1}},
      {0, 0, data[14]}, scratch);
  if (done && boxes.count > kept.size()) __builtin_trap();
  return 0;
}
