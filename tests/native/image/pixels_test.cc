// Samples that are pixels: every layout, and sizes that cannot be.
#include "image/pixels.h"

#include <gtest/gtest.h>

#include <vector>

#include "image/pipeline.h"

namespace nostall::image {
namespace {

constexpr uint32_t kHeight = 5, kWidth = 7;

// The value of channel `c` (red, green, blue) at (y, x).
uint8_t value(uint32_t y, uint32_t x, uint32_t c) {
  return static_cast<uint8_t>(y * 40 + x * 5 + c);
}

std::vector<std::byte> sample_of(const Pixels& p) {
  std::vector<std::byte> bytes(size_t{p.height} * p.width * p.channels);
  for (uint32_t y = 0; y < p.height; ++y) {
    for (uint32_t x = 0; x < p.width; ++x) {
      for (uint32_t c = 0; c < p.channels; ++c) {
        const uint32_t place = p.bgr ? p.channels - 1 - c : c;
        const size_t at = p.channels_first ? (size_t{place} * p.height + y) * p.width + x
                                           : (size_t{y} * p.width + x) * p.channels + place;
        bytes[at] = std::byte{value(y, x, c)};
      }
    }
  }
  return bytes;
}

TEST(Pixels, EveryLayoutGivesTheSameImage) {
  for (const uint32_t channels : {1u, 3u}) {
    for (const bool channels_first : {false, true}) {
      for (const bool bgr : {false, true}) {
        const Pixels p{kHeight, kWidth, channels, channels_first, bgr};
        Buffer buffer;
        const auto bitmap = unpack_pixels(sample_of(p), p, buffer);
        ASSERT_TRUE(bitmap);
        const Bitmap& b = bitmap.value();
        ASSERT_EQ(b.width, kWidth);
        ASSERT_EQ(b.height, kHeight);
        for (uint32_t y = 0; y < kHeight; ++y) {
          for (uint32_t x = 0; x < kWidth; ++x) {
            for (uint32_t c = 0; c < 3; ++c) {
              EXPECT_EQ(b.pixels[y * b.stride + x * 4 + c], value(y, x, channels == 1 ? 0 : c));
            }
          }
        }
      }
    }
  }
}

TEST(Pixels, AnotherNumberOfBytesIsRefused) {
  const Pixels p{kHeight, kWidth, 3, false, false};
  std::vector<std::byte> bytes = sample_of(p);
  Buffer buffer;
  for (const size_t size : {size_t{0}, bytes.size() - 1, bytes.size() + 1}) {
    bytes.resize(size);
    const auto bitmap = unpack_pixels(bytes, p, buffer);
    ASSERT_FALSE(bitmap);
    EXPECT_EQ(bitmap.error().kind(), ErrorKind::corruption);
  }
}

TEST(Pixels, WhatIsNoImageIsRefusedBeforeTheFirstSample) {
  const std::vector<Step> steps{CenterCrop{4, 4}};
  for (const Pixels& p :
       {Pixels{4, 4, 2, false, false}, Pixels{0, 4, 3, false, false},
        Pixels{4, 70'000, 3, false, false}, Pixels{60'000, 60'000, 3, false, false}}) {
    Options options;
    options.pixels = p;
    EXPECT_THROW(Pipeline::compile(steps, options), Error);
  }
}

TEST(Pixels, AreCroppedLikeADecodedImage) {
  Options options;
  options.pixels = Pixels{kHeight, kWidth, 3, true, true};
  const std::vector<Step> steps{CenterCrop{3, 3}};
  const Pipeline pipeline = Pipeline::compile(steps, options);
  std::vector<std::byte> out(pipeline.output().bytes());
  Scratch scratch;
  ASSERT_TRUE(pipeline.apply(sample_of(*options.pixels), {}, scratch, out));
  for (uint32_t y = 0; y < 3; ++y) {
    for (uint32_t x = 0; x < 3; ++x) {
      for (uint32_t c = 0; c < 3; ++c) {
        EXPECT_EQ(std::to_integer<int>(out[(y * 3 + x) * 3 + c]), value(y + 1, x + 2, c));
      }
    }
  }
}

TEST(Pixels, ScratchMemoryIsCountedAndGivenBackAfterALargeImage) {
  Options options;
  options.pixels = Pixels{600, 500, 1, false, false};
  const Pipeline pipeline = Pipeline::compile(std::vector<Step>{Resize{8, 8}}, options);
  std::vector<std::byte> out(pipeline.output().bytes());
  HeldBytes held;
  {
    Scratch scratch(&held);
    ASSERT_TRUE(pipeline.apply(sample_of(*options.pixels), {}, scratch, out));
    EXPECT_GE(scratch.bytes(), 600u * 500 * 4);
    EXPECT_EQ(held.now(), scratch.bytes());
    const std::vector<std::byte> before = out;
    const size_t large = scratch.bytes();
    scratch.trim(large);
    EXPECT_EQ(scratch.bytes(), large);
    Options small = options;
    small.pixels = Pixels{20, 20, 1, false, false};
    const Pipeline of_small = Pipeline::compile(std::vector<Step>{Resize{8, 8}}, small);
    const auto small_images = [&](int count) {
      for (int i = 0; i < count; ++i) {
        ASSERT_TRUE(of_small.apply(sample_of(*small.pixels), {}, scratch, out));
        scratch.trim(large - 1);
      }
    };
    // Memory is not given back between large images.
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(pipeline.apply(sample_of(*options.pixels), {}, scratch, out));
      scratch.trim(large - 1);
      small_images(Scratch::kSmallImages - 1);
      EXPECT_EQ(scratch.bytes(), large);
    }
    small_images(1);
    EXPECT_EQ(scratch.bytes(), 0u);
    EXPECT_EQ(held.now(), 0u);
    ASSERT_TRUE(pipeline.apply(sample_of(*options.pixels), {}, scratch, out));
    EXPECT_EQ(out, before);
  }
  EXPECT_EQ(held.now(), 0u);
  EXPECT_GE(held.most(), 600u * 500 * 4);
}

}  // namespace
}  // namespace nostall::image
