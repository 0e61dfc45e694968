// Every kind of field from sound and from bad bytes, and batches put together from them.
#include "fields/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spng.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "fields/npy.h"
#include "fields/text.h"
#include "fields/wav.h"

namespace nostall::fields {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Memory = std::vector<std::byte>;

Memory bytes_of(std::string_view text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

template <typename T>
Memory bytes_of(std::initializer_list<T> values) {
  const auto* begin = reinterpret_cast<const std::byte*>(values.begin());
  return {begin, begin + values.size() * sizeof(T)};
}

void add(Memory& to, const Memory& more) { to.insert(to.end(), more.begin(), more.end()); }

Memory npy(const std::string& descr, const std::string& shape, const Memory& values,
           const std::string& fortran = "False") {
  const std::string header =
      "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }\n";
  Memory out = bytes_of(std::string_view("\x93NUMPY\x01\x00", 8));
  out.push_back(static_cast<std::byte>(header.size() & 0xff));
  out.push_back(static_cast<std::byte>(header.size() >> 8));
  add(out, bytes_of(header));
  add(out, values);
  return out;
}

Memory number(uint32_t value, size_t size) {
  Memory out;
  for (size_t i = 0; i < size; ++i) out.push_back(static_cast<std::byte>(value >> (8 * i)));
  return out;
}

Memory wav(uint32_t tag, uint32_t bits, uint32_t channels, const Memory& values,
           uint32_t promised = 0) {
  Memory out = bytes_of("RIFF");
  add(out, number(0, 4));
  add(out, bytes_of("WAVEfmt "));
  add(out, number(16, 4));
  add(out, number(tag, 2));
  add(out, number(channels, 2));
  add(out, number(8000, 4));
  add(out, number(8000 * channels * bits / 8, 4));
  add(out, number(channels * bits / 8, 2));
  add(out, number(bits, 2));
  add(out, bytes_of("data"));
  add(out, number(promised != 0 ? promised : static_cast<uint32_t>(values.size()), 4));
  add(out, values);
  return out;
}

// A PNG of one channel, from values as PNG packs them.
Memory png(uint32_t width, uint32_t height, uint8_t bits, uint8_t colour, const Memory& packed) {
  const std::unique_ptr<spng_ctx, decltype(&spng_ctx_free)> png(spng_ctx_new(SPNG_CTX_ENCODER),
                                                                &spng_ctx_free);
  spng_set_option(png.get(), SPNG_ENCODE_TO_BUFFER, 1);
  spng_ihdr header{width, height, bits, colour, 0, 0, 0};
  spng_set_ihdr(png.get(), &header);
  spng_plte palette{};
  palette.n_entries = 1u << std::min<unsigned>(bits, 8);
  if (colour == SPNG_COLOR_TYPE_INDEXED) spng_set_plte(png.get(), &palette);
  EXPECT_EQ(spng_encode_image(png.get(), packed.data(), packed.size(), SPNG_FMT_PNG,
                              SPNG_ENCODE_FINALIZE),
            0);
  size_t size = 0;
  int error = 0;
  void* data = spng_get_png_buffer(png.get(), &size, &error);
  const auto* begin = static_cast<const std::byte*>(data);
  Memory out(begin, begin + size);
  std::free(data);
  return out;
}

class Heap : public Holder {
 public:
  std::byte* take(size_t bytes) override {
    taken_.push_back(std::make_unique<std::byte[]>(bytes + 1));
    return taken_.back().get();
  }

 private:
  std::vector<std::unique_ptr<std::byte[]>> taken_;
};

// One output of a batch, as the bindings see it.
struct Got {
  Output output;
  std::vector<int64_t> shape, counts, shapes;
  Memory values;
  std::string error;

  template <typename T>
  std::vector<T> as() const {
    std::vector<T> out(values.size() / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), values.data(), out.size() * sizeof(T));
    return out;
  }
};

std::vector<int64_t> integers(const std::byte* from, size_t count) {
  std::vector<int64_t> out(count);
  if (count != 0) std::memcpy(out.data(), from, count * sizeof(int64_t));
  return out;
}

int64_t product(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t side : shape) count *= side;
  return count;
}

// A batch of samples of one field. An absent sample is missing.
Got batch_of(Field field, const std::vector<std::optional<Memory>>& samples) {
  const Program program = Program::compile({std::move(field)});
  const size_t n = samples.size(), ragged = program.ragged();
  Memory slab(program.slab_bytes(n));
  std::vector<Ragged> held(n * ragged);
  Heap heap;
  Scratch scratch;
  Got got;
  got.output = program.outputs()[0];
  for (size_t i = 0; i < n; ++i) {
    // Of its exact size, so that a byte read behind it is found.
    const auto exact = std::make_unique<std::byte[]>(samples[i] ? samples[i]->size() : 0);
    if (samples[i]) std::copy(samples[i]->begin(), samples[i]->end(), exact.get());
    const source::FieldBytes located{{exact.get(), samples[i] ? samples[i]->size() : 0},
                                     samples[i].has_value()};
    const Place place{slab.data(), n, i, std::span(held).subspan(i * ragged, ragged), &heap};
    auto result = program.apply({&located, 1}, {0, 0, i}, scratch, place);
    if (!result) {
      got.error = result.error().what();
      EXPECT_EQ(result.error().kind(), ErrorKind::corruption);
      return got;
    }
  }
  if (ragged == 0) {
    got.values = slab;
    return got;
  }
  uint64_t bytes = 0;
  const std::vector<Laid> laid = program.plan_tail(held, n, bytes);
  Memory tail(bytes);
  program.lay_tail(held, n, laid, tail.data());
  got.shape = laid[0].shape;
  const std::byte* values = tail.data() + laid[0].values;
  got.values.assign(values, values + product(got.shape) * size_of(got.output.type));
  got.counts =
      integers(tail.data() + laid[0].counts, static_cast<size_t>(product(laid[0].counts_shape)));
  if (got.output.form == Form::ragged && !got.output.by_rows()) {
    got.shapes = integers(tail.data() + laid[0].shapes, n * got.output.shape.size());
  }
  return got;
}

template <typename Kind>
Field field(Kind kind, bool padded = false) {
  Field f;
  f.name = "it";
  f.kind = std::move(kind);
  f.padded = padded;
  return f;
}

TEST(Scalars, RawDecimalAndStoredAsAnotherType) {
  EXPECT_THAT(
      batch_of(field(Scalar{}), {bytes_of<int64_t>({-7}), bytes_of<int64_t>({8})}).as<int64_t>(),
      ElementsAre(-7, 8));
  const Scalar decimal{Type::int32, Scalar::Codec::decimal, {}};
  EXPECT_THAT(
      batch_of(field(decimal), {bytes_of("12\n"), bytes_of(" -3 "), bytes_of("+4")}).as<int32_t>(),
      ElementsAre(12, -3, 4));
  const Scalar real{Type::float32, Scalar::Codec::decimal, {}};
  EXPECT_THAT(batch_of(field(real), {bytes_of("0.5"), bytes_of("1e3")}).as<float>(),
              ElementsAre(0.5f, 1000.f));
  const Scalar narrowed{Type::float32, Scalar::Codec::raw, Type::float64};
  EXPECT_THAT(batch_of(field(narrowed), {bytes_of<double>({0.25})}).as<float>(),
              ElementsAre(0.25f));
  const Scalar widened{Type::float32, Scalar::Codec::raw, Type::float16};
  EXPECT_THAT(batch_of(field(widened), {bytes_of<uint16_t>({0x3e00})}).as<float>(),
              ElementsAre(1.5f));
  const Scalar whole{Type::uint8, Scalar::Codec::raw, Type::float64};
  EXPECT_THAT(batch_of(field(whole), {bytes_of<double>({255})}).as<uint8_t>(), ElementsAre(255));
}

TEST(Scalars, BadOnesNameTheField) {
  const Scalar byte{Type::uint8, Scalar::Codec::decimal, {}};
  for (const char* text : {"", "256", "-1", "1x", "1.5", "0x10", "- 1", "nan"}) {
    EXPECT_THAT(batch_of(field(byte), {bytes_of(text)}).error, HasSubstr("field it: '")) << text;
  }
  EXPECT_THAT(batch_of(field(Scalar{}), {bytes_of("1234567")}).error, HasSubstr("7 bytes"));
  const Scalar flag{Type::boolean, Scalar::Codec::raw, {}};
  EXPECT_THAT(batch_of(field(flag), {bytes_of("\x02")}).error, HasSubstr("bool"));
  const Scalar whole{Type::uint8, Scalar::Codec::raw, Type::float64};
  for (const double value : {256.0, -1.0, 0.5, std::nan(""), 1e300}) {
    EXPECT_THAT(batch_of(field(whole), {bytes_of<double>({value})}).error, HasSubstr("uint8"));
  }
  const Scalar small{Type::int8, Scalar::Codec::raw, Type::int64};
  EXPECT_THAT(batch_of(field(small), {bytes_of<int64_t>({128})}).error, HasSubstr("int8"));
}

TEST(Scalars, FiniteNumbersDoNotBecomeInfinite) {
  const double infinite = std::numeric_limits<double>::infinity();
  const Scalar single{Type::float32, Scalar::Codec::raw, Type::float64};
  const Scalar half{Type::float16, Scalar::Codec::raw, Type::float64};
  for (const double value : {3.5e38, -1e300}) {
    EXPECT_THAT(batch_of(field(single), {bytes_of<double>({value})}).error, HasSubstr("float32"));
    EXPECT_THAT(batch_of(field(half), {bytes_of<double>({value})}).error, HasSubstr("float16"));
  }
  EXPECT_THAT(batch_of(field(half), {bytes_of<double>({-65520})}).error, HasSubstr("float16"));
  const Scalar counted{Type::float16, Scalar::Codec::raw, Type::uint32};
  EXPECT_THAT(batch_of(field(counted), {bytes_of<uint32_t>({70000})}).error, HasSubstr("float16"));
  const Scalar packed{Type::float16, Scalar::Codec::msgpack, {}};
  EXPECT_THAT(
      batch_of(field(packed), {bytes_of(std::string_view("\xce\x00\x01\x11\x70", 5))}).error,
      HasSubstr("float16"));
  EXPECT_THAT(batch_of(field(single), {bytes_of<double>({-infinite})}).as<float>(),
              ElementsAre(static_cast<float>(-infinite)));
  EXPECT_THAT(batch_of(field(half), {bytes_of<double>({65519}), bytes_of<double>({infinite})})
                  .as<uint16_t>(),
              ElementsAre(0x7bff, 0x7c00));
}

TEST(Missing, FilledOrRefused) {
  EXPECT_THAT(batch_of(field(Scalar{}), {std::nullopt}).error,
              HasSubstr("field it: it is missing"));
  Field filled = field(Scalar{});
  filled.fill = bytes_of<int64_t>({-1});
  EXPECT_THAT(batch_of(filled, {std::nullopt, bytes_of<int64_t>({5})}).as<int64_t>(),
              ElementsAre(-1, 5));
}

TEST(Texts, MustBeUtf8) {
  const Got got = batch_of(field(Text{}), {bytes_of("ab"), bytes_of(""), bytes_of("\xc3\xa9")});
  EXPECT_THAT(got.counts, ElementsAre(0, 2, 2, 4));
  // Cut, overlong, half of a pair of UTF-16, behind the last character, a continuation alone.
  for (const char* bad : {"abcdefgh\xc3", "\xc0\xaf", "\xe0\x80\x80", "\xed\xa0\x80",
                          "\xf4\x90\x80\x80", "\x80", "\xff"}) {
    EXPECT_THAT(batch_of(field(Text{}), {bytes_of(bad)}).error, HasSubstr("is not UTF-8")) << bad;
  }
}

TEST(Texts, JsonIsChecked) {
  for (const char* good :
       {"{}", " [1, -2.5e+3, \"\\u00e9\\n\", true, false, null, {\"a\": [[], {}]}]\n", "0", "\"\"",
        "-0.0E5", "{\"a\":1,\"b\":[2]}"}) {
    EXPECT_TRUE(check_json(bytes_of(good))) << good;
  }
  for (const char* bad :
       {"",   "{",     "[1,]",     "{\"a\"}", "{\"a\":1,}",  "01",      "1.",    ".5",
        "1e", "NaN",   "\"\x01\"", "\"\\x\"", "\"\\u12g4\"", "[1 2]",   "{} {}", "tru",
        "-",  "{1:2}", "[}",       "]",       "\"abc",       "\"\xff\""}) {
    EXPECT_FALSE(check_json(bytes_of(bad))) << bad;
  }
  const std::string deep(kMostNesting, '['), deeper(kMostNesting + 1, '[');
  EXPECT_TRUE(check_json(bytes_of(deep + std::string(kMostNesting, ']'))));
  EXPECT_FALSE(check_json(bytes_of(deeper + std::string(kMostNesting + 1, ']'))));
  EXPECT_FALSE(check_json(bytes_of(std::string(kMostDigits + 1, '1'))));
}

TEST(Arrays, DenseRaggedAndPadded) {
  const Array dense{Type::int16, {2, 2}};
  EXPECT_THAT(batch_of(field(dense), {bytes_of<int16_t>({1, 2, 3, 4})}).as<int16_t>(),
              ElementsAre(1, 2, 3, 4));
  const Array rows{Type::int16, {kRagged, 2}};
  const std::vector<std::optional<Memory>> samples{bytes_of<int16_t>({1, 2, 3, 4}), Memory{},
                                                   bytes_of<int16_t>({5, 6})};
  Got got = batch_of(field(rows), samples);
  EXPECT_THAT(got.shape, ElementsAre(3, 2));
  EXPECT_THAT(got.counts, ElementsAre(0, 2, 2, 3));
  EXPECT_THAT(got.as<int16_t>(), ElementsAre(1, 2, 3, 4, 5, 6));
  got = batch_of(field(rows, true), samples);
  EXPECT_THAT(got.shape, ElementsAre(3, 2, 2));
  EXPECT_THAT(got.counts, ElementsAre(2, 0, 1));
  EXPECT_THAT(got.as<int16_t>(), ElementsAre(1, 2, 3, 4, 0, 0, 0, 0, 5, 6, 0, 0));
}

TEST(Arrays, AnySideMayBeRagged) {
  const Array kind{Type::uint8, {2, kRagged, kRagged}, Array::Codec::npy};
  const std::vector<std::optional<Memory>> samples{
      npy("|u1", "(2, 1, 2)", bytes_of<uint8_t>({1, 2, 3, 4})),
      npy("|u1", "(2, 2, 1)", bytes_of<uint8_t>({5, 6, 7, 8}))};
  Got got = batch_of(field(kind), samples);
  EXPECT_THAT(got.shape, ElementsAre(8));
  EXPECT_THAT(got.counts, ElementsAre(0, 4, 8));
  EXPECT_THAT(got.shapes, ElementsAre(2, 1, 2, 2, 2, 1));
  got = batch_of(field(kind, true), samples);
  EXPECT_THAT(got.shape, ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(got.counts, ElementsAre(2, 1, 2, 2, 2, 1));
  EXPECT_THAT(got.as<uint8_t>(), ElementsAre(1, 2, 0, 0, 3, 4, 0, 0, 5, 0, 6, 0, 7, 0, 8, 0));
}

TEST(Arrays, BatchesWithoutSamplesHaveTheirShapes) {
  Got got = batch_of(field(Array{Type::float32, {kRagged, 4}}), {});
  EXPECT_THAT(got.shape, ElementsAre(0, 4));
  EXPECT_THAT(got.counts, ElementsAre(0));
  got = batch_of(field(Array{Type::float32, {kRagged, 4}}, true), {});
  EXPECT_THAT(got.shape, ElementsAre(0, 0, 4));
}

TEST(Arrays, RaggedLengthsMustFit) {
  const Array rows{Type::int16, {kRagged, 2}};
  EXPECT_THAT(batch_of(field(rows), {bytes_of("12345")}).error,
              HasSubstr("5 bytes are no int16 array of shape (any, 2)"));
  EXPECT_THAT(batch_of(field(Array{Type::float64, {}}), {Memory{}}).error, HasSubstr("0 bytes"));
  EXPECT_THROW(Program::compile({field(Array{Type::uint8, {kRagged, kRagged}})}), Error);
  EXPECT_THROW(Program::compile({field(Array{Type::uint8, {kRagged, 0}})}), Error);
  EXPECT_THROW(Program::compile({field(Array{Type::uint8, {1 << 30, 1 << 30}})}), Error);
}

TEST(Npy, WhatNumPyWritesIsRead) {
  const Memory values = bytes_of<float>({1, 2, 3, 4, 5, 6});
  auto got = parse_npy(npy("<f4", "(2, 3)", values));
  ASSERT_TRUE(got);
  EXPECT_EQ(got.value().dims, 2u);
  EXPECT_EQ(got.value().shape[1], 3);
  EXPECT_EQ(got.value().values.size(), values.size());
  EXPECT_EQ(parse_npy(npy("|b1", "()", bytes_of("\x01"))).take().dims, 0u);
  EXPECT_EQ(parse_npy(npy("<f4", "(6,)", values, "True")).take().dims, 1u);
  EXPECT_EQ(parse_npy(npy("<i8", "(0, 5)", {})).take().values.size(), 0u);
  // A batch would be padded to the other side.
  EXPECT_FALSE(parse_npy(npy("<i8", "(1099511627776, 0)", {})));
}

TEST(Npy, EveryOrderIsReadAsC) {
  const Memory in_c = bytes_of<uint16_t>({1, 2, 3, 4, 5, 6});
  const Array kind{Type::uint16, {kRagged, kRagged}, Array::Codec::npy};
  for (const auto& [descr, fortran, values] :
       std::vector<std::tuple<const char*, const char*, Memory>>{
           {"<u2", "True", bytes_of<uint16_t>({1, 4, 2, 5, 3, 6})},
           {">u2", "False", bytes_of<uint8_t>({0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6})},
           {">u2", "True", bytes_of<uint8_t>({0, 1, 0, 4, 0, 2, 0, 5, 0, 3, 0, 6})}}) {
    const auto got = batch_of(field(kind), {npy(descr, "(2, 3)", values, fortran)});
    EXPECT_EQ(got.error, "") << descr << fortran;
    EXPECT_THAT(got.as<uint16_t>(), ElementsAre(1, 2, 3, 4, 5, 6)) << descr << fortran;
  }
  const Memory cube = npy("<u2", "(2, 1, 3)", bytes_of<uint16_t>({1, 4, 2, 5, 3, 6}), "True");
  Memory out(in_c.size());
  put_in_order(parse_npy(cube).take(), out.data());
  EXPECT_EQ(out, in_c);
  EXPECT_EQ(parse_npy(npy(">i8", "(0, 5)", {}, "True")).take().values.size(), 0u);
}

TEST(Npy, WhateverElseIsRefused) {
  const Memory values = bytes_of<float>({1, 2, 3, 4, 5, 6});
  const Memory good = npy("<f4", "(2, 3)", values);
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(parse_npy(std::span(good).first(size))) << size;
  }
  for (const auto& [descr, shape] :
       std::vector<std::pair<const char*, const char*>>{{"<f4", "(2, 2)"},
                                                        {"<f4", "(2, 4)"},
                                                        {"<f4", "(-2, -3)"},
                                                        {"<f4", "(4611686018427387904, 4)"},
                                                        {"<f4", "(1,1,1,1,1,1,1,2,3)"},
                                                        {"<f4", "2, 3"},
                                                        {"|O", "(3,)"},
                                                        {"<c8", "(3,)"},
                                                        {"<U6", "(1,)"},
                                                        {"<M8[ns]", "(3,)"},
                                                        {"<f8", "(2, 3)"}}) {
    EXPECT_FALSE(parse_npy(npy(descr, shape, values))) << descr << " " << shape;
  }
  EXPECT_THAT(parse_npy(npy("|O", "(3,)", values)).error().what(), HasSubstr("pickle"));
  const Array kind{Type::float32, {kRagged}, Array::Codec::npy};
  EXPECT_THAT(batch_of(field(kind), {npy("<f8", "(3,)", values)}).error,
              HasSubstr("it is float64 of shape (3,), not float32 of shape (any,)"));
}

TEST(Boxes, NumbersThatAreNoBoxes) {
  Array kind{Type::float32, {kRagged, 4}};
  kind.meaning = Array::Meaning::xyxy;
  EXPECT_EQ(batch_of(field(kind), {bytes_of<float>({0, 0, 5, 5, 3, 3, 3, 3}), Memory{}}).error, "");
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  EXPECT_THAT(batch_of(field(kind), {bytes_of<float>({0, 0, 1, 1, 0, kNan, 5, 5})}).error,
              HasSubstr("box 1 has NaN"));
  EXPECT_NE(batch_of(field(kind), {bytes_of<float>({0, 0, kInfinite, 5})}).error, "");
  EXPECT_THAT(batch_of(field(kind), {bytes_of<float>({5, 0, 4, 5})}).error, HasSubstr("size"));
  kind.meaning = Array::Meaning::xywh;
  EXPECT_EQ(batch_of(field(kind), {bytes_of<float>({5, 0, 4, 5})}).error, "");
  EXPECT_NE(batch_of(field(kind), {bytes_of<float>({5, 0, -4, 5})}).error, "");
  kind.normalised = true;
  EXPECT_THAT(batch_of(field(kind), {bytes_of<float>({0, 0.5, 1.5, 0})}).error,
              HasSubstr("between 0 and 1"));
  Array points{Type::float32, {kRagged, 3}};
  points.meaning = Array::Meaning::keypoints;
  EXPECT_THAT(batch_of(field(points), {bytes_of<float>({1, kNan, 2})}).error, HasSubstr("point 0"));
  points.shape = {kRagged, 5};
  EXPECT_THROW(Program::compile({field(points)}), Error);
}

TEST(Masks, ValuesAreThoseStored) {
  // Two pixels in each of two rows; bits are packed from the highest.
  const Memory two_bits = bytes_of<uint8_t>({0b01110000, 0b10000000});
  EXPECT_THAT(batch_of(field(Mask{Type::uint8, 2, 2}), {png(2, 2, 2, 0, two_bits)}).as<uint8_t>(),
              ElementsAre(1, 3, 2, 0));
  EXPECT_THAT(batch_of(field(Mask{Type::int64, 1, 3}),
                       {png(3, 1, 8, SPNG_COLOR_TYPE_INDEXED, bytes_of<uint8_t>({0, 7, 255}))})
                  .as<int64_t>(),
              ElementsAre(0, 7, 255));
  const Memory wide = png(2, 1, 16, 0, bytes_of<uint16_t>({300, 65535}));
  EXPECT_THAT(batch_of(field(Mask{Type::uint16, 1, 2}), {wide}).as<uint16_t>(),
              ElementsAre(300, 65535));
  EXPECT_THAT(batch_of(field(Mask{Type::uint8, 1, 2}), {wide}).error, HasSubstr("wider"));
  const Got ragged = batch_of(field(Mask{}), {png(3, 1, 8, 0, bytes_of<uint8_t>({1, 2, 3})),
                                              png(1, 2, 8, 0, bytes_of<uint8_t>({4, 5}))});
  EXPECT_THAT(ragged.shapes, ElementsAre(1, 3, 2, 1));
  EXPECT_THAT(ragged.as<uint8_t>(), ElementsAre(1, 2, 3, 4, 5));
}

TEST(Masks, OtherImagesAreRefused) {
  EXPECT_THAT(
      batch_of(field(Mask{}), {png(1, 1, 8, SPNG_COLOR_TYPE_TRUECOLOR, bytes_of("abc"))}).error,
      HasSubstr("colours"));
  EXPECT_THAT(batch_of(field(Mask{}), {bytes_of("\xff\xd8\xff\xe0")}).error, HasSubstr("PNG"));
  const Memory good = png(3, 1, 8, 0, bytes_of<uint8_t>({1, 2, 3}));
  EXPECT_NE(batch_of(field(Mask{}), {Memory(good.begin(), good.end() - 20)}).error, "");
  EXPECT_THAT(batch_of(field(Mask{Type::uint8, 2, 2}), {good}).error, HasSubstr("(1, 3)"));
}

TEST(Sound, EveryCodingGivesTheSame) {
  Audio kind;
  const std::vector<float> wanted{0.5f, -1.0f};
  EXPECT_EQ(batch_of(field(kind), {wav(1, 8, 1, bytes_of<uint8_t>({192, 0}))}).as<float>(), wanted);
  EXPECT_EQ(batch_of(field(kind), {wav(1, 16, 1, bytes_of<int16_t>({16384, -32768}))}).as<float>(),
            wanted);
  EXPECT_EQ(
      batch_of(field(kind), {wav(1, 24, 1, bytes_of<uint8_t>({0, 0, 64, 0, 0, 128}))}).as<float>(),
      wanted);
  EXPECT_EQ(
      batch_of(field(kind), {wav(1, 32, 1, bytes_of<int32_t>({1 << 30, INT32_MIN}))}).as<float>(),
      wanted);
  EXPECT_EQ(batch_of(field(kind), {wav(3, 32, 1, bytes_of<float>({0.5f, -1.0f}))}).as<float>(),
            wanted);
  kind.type = Type::int16;
  EXPECT_THAT(batch_of(field(kind), {wav(3, 32, 1, bytes_of<float>({0.5f, -3.0f, std::nanf("")}))})
                  .as<int16_t>(),
              ElementsAre(16384, -32768, 0));
}

TEST(Sound, ChannelsAndFrames) {
  const Memory stereo = wav(1, 16, 2, bytes_of<int16_t>({16384, 0, -16384, -16384}));
  EXPECT_THAT(batch_of(field(Audio{}), {stereo}).as<float>(), ElementsAre(0.25f, -0.5f));
  Audio kind;
  kind.channels = 2;
  kind.type = Type::int16;
  const Got got = batch_of(field(kind), {stereo});
  EXPECT_THAT(got.shape, ElementsAre(2, 2));
  EXPECT_THAT(got.as<int16_t>(), ElementsAre(16384, 0, -16384, -16384));
  kind.frames = 3;
  EXPECT_THAT(batch_of(field(kind), {stereo}).as<int16_t>(),
              ElementsAre(16384, 0, -16384, -16384, 0, 0));
  kind.frames = 1;
  EXPECT_THAT(batch_of(field(kind), {stereo}).as<int16_t>(), ElementsAre(16384, 0));
  kind.rate = 16000;
  EXPECT_THAT(batch_of(field(kind), {stereo}).error, HasSubstr("8000 frames a second, not 16000"));
  kind = {};
  kind.channels = 3;
  EXPECT_THAT(batch_of(field(kind), {stereo}).error, HasSubstr("2 channels, not 3"));
}

TEST(Sound, LongOnesAreWhole) {
  std::vector<int16_t> values(10001 * 3);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int16_t>(i * 7919);
  const auto at = [&](size_t i) { return static_cast<float>(values[i]) / 32768.0f; };
  const auto stored = std::as_bytes(std::span(values));
  const Memory three = wav(1, 16, 3, {stored.begin(), stored.end()});
  Audio kind;
  kind.channels = 3;
  const std::vector<float> apart = batch_of(field(kind), {three}).as<float>();
  const std::vector<float> mixed = batch_of(field(Audio{}), {three}).as<float>();
  ASSERT_EQ(apart.size(), values.size());
  ASSERT_EQ(mixed.size(), values.size() / 3);
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(apart[i], at(i)) << i;
  for (size_t f = 0; f < mixed.size(); ++f) {
    ASSERT_EQ(mixed[f], (at(3 * f) + at(3 * f + 1) + at(3 * f + 2)) / 3.0f) << f;
  }
}

TEST(Sound, HeadersThatLie) {
  const Memory values = bytes_of<int16_t>({1, 2, 3, 4});
  const Memory good = wav(1, 16, 2, values);
  ASSERT_TRUE(parse_wav(good));
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(parse_wav(std::span(good).first(size))) << size;
  }
  EXPECT_THAT(parse_wav(wav(1, 16, 2, values, 9)).error().what(), HasSubstr("8 are there"));
  EXPECT_THAT(parse_wav(wav(1, 16, 2, values, 7)).error().what(), HasSubstr("cut off"));
  EXPECT_THAT(parse_wav(wav(1, 16, 2, values, 0xffffffff)).error().what(), HasSubstr("4294967295"));
  EXPECT_THAT(parse_wav(wav(1, 12, 2, values)).error().what(), HasSubstr("12 bits"));
  EXPECT_THAT(parse_wav(wav(85, 16, 2, values)).error().what(), HasSubstr("format 85"));
  EXPECT_THAT(parse_wav(wav(1, 16, 0, values)).error().what(), HasSubstr("0 channels"));
  Memory frames = good;
  frames[32] = std::byte{3};
  EXPECT_THAT(parse_wav(frames).error().what(), HasSubstr("another size"));
}

// An image of 4 x 2 pixels, a mask on it, boxes and their labels, mirrored as one.
class Groups : public ::testing::Test {
 protected:
  Groups() {
    const std::vector<image::Step> steps{image::RandomHorizontalFlip{1.0}, image::Resize{2, 4},
                                         image::SanitizeBoundingBoxes{1, 1}};
    pipeline_ = std::make_shared<const image::Pipeline>(image::Pipeline::compile(steps));
    Array boxes{Type::float32, {kRagged, 4}};
    boxes.meaning = Array::Meaning::xyxy;
    boxes.pipeline = pipeline_;
    Array labels{Type::int64, {kRagged}};
    labels.rows_of = 3;
    fields_ = {field(labels), field(Mask{Type::int64, 0, 0, 100, pipeline_}),
               field(Image{pipeline_}), field(boxes)};
    for (uint32_t i = 0; i < fields_.size(); ++i) fields_[i].index = i;
    Memory pixels;
    for (uint8_t v = 0; v < 24; ++v) pixels.push_back(std::byte{v});
    located_ = {bytes_of<int64_t>({70, 71, 72}),
                png(4, 2, 8, 0, bytes_of<uint8_t>({1, 2, 3, 4, 5, 6, 7, 8})),
                png(4, 2, 8, SPNG_COLOR_TYPE_TRUECOLOR, pixels),
                // The second one is empty.
                bytes_of<float>({0, 0, 1, 2, 2, 0, 2, 2, 1, 0, 4, 1})};
  }

  // The error, or none, and the values.
  std::string apply() {
    const Program program = Program::compile(fields_);
    slab_.resize(program.slab_bytes(1));
    held_.resize(program.ragged());
    std::vector<source::FieldBytes> located;
    for (const Memory& m : located_) located.push_back({m, true});
    const Place place{slab_.data(), 1, 0, held_, &heap_};
    auto result = program.apply(located, {}, scratch_, place);
    mask_ = slab_.data() + program.region(1, 1);
    image_ = slab_.data() + program.region(2, 1);
    return result ? "" : result.error().what();
  }

  std::shared_ptr<const image::Pipeline> pipeline_;
  std::vector<Field> fields_;
  std::vector<Memory> located_;
  Memory slab_;
  std::vector<Ragged> held_;
  Heap heap_;
  Scratch scratch_;
  const std::byte *mask_ = nullptr, *image_ = nullptr;
};

TEST_F(Groups, AreTransformedAsOneAndRowsGoWithTheirBoxes) {
  ASSERT_EQ(apply(), "");
  EXPECT_THAT(integers(mask_, 8), ElementsAre(4, 3, 2, 1, 8, 7, 6, 5));
  EXPECT_EQ(image_[0], std::byte{9});
  EXPECT_EQ(held_[0].shape[0], 2);
  EXPECT_THAT(integers(held_[0].values, 2), ElementsAre(70, 72));
  EXPECT_EQ(held_[1].shape[0], 2);
  std::vector<float> boxes(8);
  ASSERT_EQ(held_[1].bytes, sizeof(float) * 8);
  std::memcpy(boxes.data(), held_[1].values, held_[1].bytes);
  EXPECT_THAT(boxes, ElementsAre(3, 0, 4, 2, 0, 0, 3, 1));
}

TEST_F(Groups, PartsThatDoNotFitAreErrorsWithTheirNames) {
  const std::vector<Memory> good = located_;
  located_[1] = png(3, 2, 8, 0, bytes_of<uint8_t>({1, 2, 3, 4, 5, 6}));
  EXPECT_THAT(apply(), HasSubstr("fields it, it, it: "));
  located_ = good;
  located_[0] = bytes_of<int64_t>({70, 71});
  EXPECT_THAT(apply(), HasSubstr("2 rows for 3 boxes"));
  located_ = good;
  located_[3] = bytes_of("1234567");
  EXPECT_THAT(apply(), HasSubstr("7 bytes are no float32"));
}

TEST_F(Groups, WithoutAnImageOrBoxesAreRefused) {
  std::vector<Field> fields = fields_;
  EXPECT_THROW(Program::compile({fields[1]}), Error);
  std::get<Array>(fields[0].kind).rows_of = 1;
  EXPECT_THROW(Program::compile(fields), Error);
  std::get<Array>(fields[0].kind).rows_of = 9;
  EXPECT_THROW(Program::compile(fields), Error);
  fields = fields_;
  std::get<Mask>(fields[1].kind).type = Type::uint64;
  EXPECT_THROW(Program::compile(fields), Error);
}

TEST(Programs, DenseRegionsAreAlignedAndApart) {
  Field a = field(Array{Type::uint8, {3}}), b = field(Scalar{}), c = field(Bytes{});
  b.index = 1;
  c.index = 2;
  const Program program = Program::compile({a, c, b});
  EXPECT_EQ(program.ragged(), 1u);
  EXPECT_EQ(program.ragged_before(1), 0u);
  EXPECT_EQ(program.ragged_before(2), 1u);
  EXPECT_EQ(program.region(0, 30), 0u);
  EXPECT_EQ(program.region(2, 30), 128u);  // 90, aligned
  EXPECT_EQ(program.slab_bytes(30), 128u + 30 * 8);
  EXPECT_THROW(Program::compile({}), Error);
}

}  // namespace
}  // namespace nostall::fields
