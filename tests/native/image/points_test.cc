// Boxes that no transform can move, or that have no place behind one.
#include "image/points.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nostall::image {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A perspective whose horizon is x = 10: what lies on it, and on y = 0, has no place.
Drawing to_the_horizon(bool sanitized) {
  Drawing drawing{20, 20, 20, 20, {}};
  Warp warp;
  warp.to_result = {1, 0, -10, 0, 1, 0, -0.1, 0};
  warp.to_source = warp.to_result;
  drawing.actions.push_back(warp);
  if (sanitized) drawing.actions.push_back(Sanitize{1, 1});
  return drawing;
}

TEST(Points, ABoxWithoutAPlaceIsRefusedOrTakenOut) {
  const std::vector<float> rows{1, 1, 5, 5, 10, 0, 12, 4};
  std::vector<float> out(8);
  std::vector<uint32_t> kept(2);
  Boxes boxes{rows, BoxFormat::xyxy, false, out, kept, 0};
  const auto refused = move_boxes(to_the_horizon(false), false, boxes);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->kind(), ErrorKind::corruption);
  EXPECT_THAT(refused->what(), HasSubstr("box 1 has no place behind the transforms"));

  Drawing drawing = to_the_horizon(true);
  EXPECT_FALSE(move_boxes(drawing, true, boxes).has_value());
  for (size_t i = 0; i < boxes.count; ++i) EXPECT_NE(kept[i], 1u);
  // A step that takes boxes out before the perspective does not mend what comes behind it.
  std::swap(drawing.actions[0], drawing.actions[1]);
  EXPECT_TRUE(move_boxes(drawing, true, boxes).has_value());
}

TEST(Points, ABoxOfNegativeSizeIsRefusedOrTakenOut) {
  const Drawing drawing{20, 20, 20, 20, {Sanitize{0, 0}}};
  for (const auto& [format, row] :
       {std::pair{BoxFormat::xyxy, std::vector<float>{5, 5, 2, 9}},
        std::pair{BoxFormat::xywh, std::vector<float>{5, 5, 2, -3}},
        std::pair{BoxFormat::cxcywh, std::vector<float>{5, 5, -3, 2}}}) {
    std::vector<float> out(4);
    std::vector<uint32_t> kept(1);
    Boxes boxes{row, format, false, out, kept, 0};
    const auto refused = move_boxes(drawing, false, boxes);
    ASSERT_TRUE(refused.has_value());
    EXPECT_THAT(refused->what(), HasSubstr("box 0 has a size of -3"));
    EXPECT_FALSE(move_boxes(drawing, true, boxes).has_value());
    EXPECT_EQ(boxes.count, 0u);
  }
}

}  // namespace
}  // namespace nostall::image
