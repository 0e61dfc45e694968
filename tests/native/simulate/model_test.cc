// The machine of a simulation: interpolated speeds, and values that are refused.
#include "simulate/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "machine.h"

namespace nostall::simulate {
namespace {

TEST(Interpolate, FollowsEquation41) {
  const Curve t = {{2, 86}, {4, 146}, {8, 326}};
  EXPECT_DOUBLE_EQ(interpolate(t, 1), 86);   // below the least key
  EXPECT_DOUBLE_EQ(interpolate(t, 2), 86);   // at a key
  EXPECT_DOUBLE_EQ(interpolate(t, 3), 116);  // between keys
  EXPECT_DOUBLE_EQ(interpolate(t, 5), 191);
  EXPECT_DOUBLE_EQ(interpolate(t, 64), 326);  // beyond the largest key
}

TEST(Interpolate, IsConstantWithOnePoint) {
  const Curve one = {{2, 100}};
  EXPECT_DOUBLE_EQ(interpolate(one, 1), 100);
  EXPECT_DOUBLE_EQ(interpolate(one, 9), 100);
}

TEST(Model, SharesAsEquations35To37) {
  Model model = small_cluster();
  EXPECT_DOUBLE_EQ(model.source_share(1), 66);
  EXPECT_DOUBLE_EQ(model.source_share(4), 36.5);
  model.source_link = 20;
  EXPECT_DOUBLE_EQ(model.source_share(4), 20);
  EXPECT_DOUBLE_EQ(model.thread_read(1), 10582);
  EXPECT_DOUBLE_EQ(model.thread_read(2), 43);
  EXPECT_DOUBLE_EQ(model.stage_seconds(), 1.0 / 200);
}

void expect_refused(const Model& model, const std::string& names) {
  try {
    validate(model);
    FAIL() << names << " was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::usage);
    EXPECT_THAT(error.what(), testing::HasSubstr(names));
  }
}

TEST(Model, NamesWhatCannotBe) {
  Model model = small_cluster();
  validate(model);
  model.compute = 0;
  expect_refused(model, "c must be");
  model = small_cluster();
  model.source = {{2, 86}, {1, 66}};
  expect_refused(model, "keys of t");
  model = small_cluster();
  model.source.clear();
  expect_refused(model, "t has no points");
  model = small_cluster();
  model.classes[2].read[0].second = 0;
  expect_refused(model, "r_2");
  model = small_cluster();
  model.classes[1].threads = 0;
  expect_refused(model, "p_1");
  model = small_cluster();
  model.classes.clear();
  expect_refused(model, "staging buffer");
}

}  // namespace
}  // namespace nostall::simulate
