// PNG images that are read at once: the same pixels, and the same verdicts, as libspng gives.
#include <gtest/gtest.h>
#include <spng.h>

#include <algorithm>
#include <array>
#include <bit>
#include <random>

#include "image/decode.h"
#include "image/labels.h"
#include "image/png_rows.h"
#include "png_builder.h"

namespace nostall::image {
namespace {

constexpr uint64_t kMost = 1 << 20;

std::span<const std::byte> bytes_of(const std::vector<uint8_t>& file) {
  return std::as_bytes(std::span(file));
}

// Red, green and blue of each pixel.
std::vector<uint8_t> colours(const uint8_t* pixels, size_t count) {
  std::vector<uint8_t> out;
  for (size_t i = 0; i < count; ++i) out.insert(out.end(), pixels + 4 * i, pixels + 4 * i + 3);
  return out;
}

std::vector<uint8_t> decoded(const std::vector<uint8_t>& file) {
  Buffer buffer;
  const auto image = decode_png(
      bytes_of(file), kMost, [](int64_t, int64_t) { return Wanted{}; }, buffer);
  if (!image) return {};
  const Bitmap& map = image.value();
  return colours(map.pixels, static_cast<size_t>(map.width * map.height));
}

std::vector<uint8_t> wanted(const std::vector<uint8_t>& file) {
  const auto pixels = by_libspng(file, SPNG_FMT_RGBA8);
  return colours(pixels.data(), pixels.size() / 4);
}

struct Kind {
  uint8_t color, bits;
  unsigned channels;
};
constexpr Kind kKinds[] = {{0, 1, 1}, {0, 2, 1}, {0, 4, 1}, {0, 8, 1}, {0, 16, 1}, {3, 1, 1},
                           {3, 2, 1}, {3, 4, 1}, {3, 8, 1}, {2, 8, 3}, {4, 8, 2},  {6, 8, 4}};

std::vector<uint8_t> random_rows(std::mt19937& random, const Kind& kind, uint32_t width,
                                 uint32_t height) {
  const size_t stride = (size_t{width} * kind.bits * kind.channels + 7) / 8;
  std::vector<uint8_t> rows;
  for (uint32_t y = 0; y < height; ++y) {
    rows.push_back(static_cast<uint8_t>(random() % 5));
    for (size_t i = 0; i < stride; ++i) rows.push_back(static_cast<uint8_t>(random()));
  }
  return rows;
}

std::vector<uint8_t> palette(size_t entries) {
  std::vector<uint8_t> colours(entries * 3);
  for (size_t i = 0; i < colours.size(); ++i) colours[i] = static_cast<uint8_t>(i * 7);
  return colours;
}

TEST(Png, RowsOfEveryKindAndFilterAreThoseOfLibspng) {
  std::mt19937 random(1);
  for (const Kind& kind : kKinds) {
    for (const uint32_t width : {1u, 2u, 3u, 7u, 8u, 9u, 31u, 64u, 65u}) {
      for (const size_t most : {size_t{1} << 20, size_t{11}}) {
        PngBuilder builder(width, 13, kind.bits, kind.color);
        if (kind.color == 3) builder.chunk("PLTE", palette(size_t{1} << kind.bits));
        const auto rows = PngBuilder::compress(random_rows(random, kind, width, 13));
        const auto file = builder.stream(rows, most).end();
        SCOPED_TRACE(testing::Message() << "colour " << int{kind.color} << ", " << int{kind.bits}
                                        << " bits, width " << width << ", chunks of " << most);
        auto plain = PngRows::open(bytes_of(file));
        ASSERT_TRUE(plain);
        std::vector<uint8_t> scratch(plain->scratch_size() + 64);
        ASSERT_TRUE(plain->inflate(scratch.data()));
        std::array<std::vector<uint8_t>, 2> pair;
        for (auto& row : pair) row.resize(plain->stride() + 64);
        for (uint32_t y = 0; y < 13; ++y) {
          ASSERT_TRUE(plain->next(pair[y % 2].data(), y == 0 ? nullptr : pair[1 - y % 2].data()));
        }
        if (kind.bits == 8) {
          EXPECT_EQ(decoded(file), wanted(file));
        }
        if (kind.channels == 1) {
          Buffer buffer;
          const auto labels = decode_labels(bytes_of(file), kMost, buffer);
          ASSERT_TRUE(labels);
          const auto stored = by_libspng(file, SPNG_FMT_PNG);
          const auto* values = reinterpret_cast<const uint8_t*>(labels.value().values);
          if (kind.bits >= 8) {
            EXPECT_TRUE(std::equal(stored.begin(), stored.end(), values));
          } else {
            const size_t stride = (width * kind.bits + 7) / 8;
            for (size_t y = 0; y < 13; ++y) {
              for (size_t x = 0; x < width; ++x) {
                const size_t bit = x * kind.bits;
                const int value = stored[y * stride + bit / 8] >> (8 - kind.bits - bit % 8);
                EXPECT_EQ(values[y * width + x], value & ((1 << kind.bits) - 1));
              }
            }
          }
        }
      }
    }
  }
}

TEST(Png, FilesThatAreNotPlainGetTheVerdictOfLibspng) {
  std::mt19937 random(2);
  const Kind grey{0, 8, 1};
  auto rows = random_rows(random, grey, 9, 5);
  const auto stream = PngBuilder::compress(rows);
  const auto builder = [] { return PngBuilder(9, 5, 8, 0); };
  const std::span<const uint8_t> all(stream);
  rows[10] = 5;
  const auto odd_filter = PngBuilder::compress(rows);
  rows[10] = 0;
  auto longer = rows;
  longer.resize(longer.size() + 20, 1);
  rows.resize(rows.size() - 1);
  const std::vector<uint8_t> text{'a', 0, 'b'};
  const std::array files = {
      builder().stream(odd_filter, 999).end(),
      builder().stream(PngBuilder::compress(rows), 999).end(),
      builder().stream(PngBuilder::compress(longer), 999).end(),
      builder().stream(all.first(all.size() - 3), 999).end(),
      builder().chunk("IDAT", all.first(4)).chunk("tEXt", text).chunk("IDAT", all.subspan(4)).end(),
      builder().chunk("ABCD", text).stream(stream, 999).end(),
      builder().chunk("tEXt", text).stream(stream, 999).end(),
      builder().chunk("PLTE", palette(3)).chunk("PLTE", palette(3)).stream(stream, 999).end(),
      builder().end(),
      PngBuilder(9, 5, 8, 3).stream(stream, 999).end(),
      PngBuilder(9, 5, 8, 3).chunk("PLTE", palette(3)).stream(stream, 999).end(),
      PngBuilder(9, 5, 8, 0, 1).stream(stream, 999).end(),
      PngBuilder(0, 5, 8, 0).stream(stream, 999).end(),
      PngBuilder(9, 5, 3, 0).stream(stream, 999).end(),
      PngBuilder(9, 5, 8, 5).stream(stream, 999).end(),
  };
  for (size_t i = 0; i < files.size(); ++i) {
    EXPECT_EQ(decoded(files[i]), wanted(files[i])) << "file " << i;
  }
}

TEST(Png, AnyDamagedByteGetsTheVerdictOfLibspng) {
  std::mt19937 random(3);
  const auto stream = PngBuilder::compress(random_rows(random, {2, 8, 3}, 9, 5));
  const auto file = PngBuilder(9, 5, 8, 2).stream(stream, 40).end();
  for (size_t at = 0; at < file.size(); ++at) {
    for (const uint8_t bit : {0x01, 0x20, 0x80}) {
      auto damaged = file;
      damaged[at] ^= bit;
      EXPECT_EQ(decoded(damaged), wanted(damaged)) << "byte " << at << " bit " << int{bit};
    }
    const std::vector<uint8_t> cut(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(at));
    EXPECT_EQ(decoded(cut), wanted(cut)) << at << " bytes";
  }
}

TEST(Png, SizesBeyondTheCapAreRefusedBeforeMemoryIsTaken) {
  const auto file = PngBuilder(60000, 60000, 8, 0).stream(PngBuilder::compress({}), 99).end();
  Buffer buffer;
  EXPECT_FALSE(decode_labels(bytes_of(file), kMost, buffer));
  EXPECT_TRUE(decoded(file).empty());
  EXPECT_EQ(buffer.size(), 0u);
}

}  // namespace
}  // namespace nostall::image
