// One function a kind: the bytes are checked, then written as values.
#include "fields/decode.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "base/half.h"
#include "base/random.h"
#include "fields/flac.h"
#include "fields/npy.h"
#include "fields/numbers.h"
#include "fields/text.h"
#include "fields/wav.h"
#include "image/labels.h"

namespace nostall::fields {
namespace {

static_assert(std::endian::native == std::endian::little, "values are copied as they are stored");

constexpr uint64_t kDrawOfDecoders = 0x4465636f64657273;  // apart from all other draws

Error damaged(const std::string& what) { return Error(ErrorKind::corruption, what); }

std::string text_of(std::span<const int64_t> shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + (shape[i] == kRagged ? "any" : std::to_string(shape[i]));
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

bool fits(std::span<const int64_t> shape, std::span<const int64_t> wanted) {
  return std::equal(shape.begin(), shape.end(), wanted.begin(), wanted.end(),
                    [](int64_t have, int64_t want) { return want == kRagged || have == want; });
}

Decoded copy_bytes(std::span<const std::byte> bytes, const Destination& to) {
  const int64_t size = static_cast<int64_t>(bytes.size());
  std::byte* out = to.begin({&size, 1}, bytes.size());
  if (!bytes.empty()) std::memcpy(out, bytes.data(), bytes.size());
  return std::monostate{};
}

// A byte that is neither 0 nor 1 is no bool.
bool booleans(std::span<const std::byte> values) {
  return std::all_of(values.begin(), values.end(), [](std::byte b) { return b <= std::byte{1}; });
}

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Calls f(value) with the number at `from`, a float for a float16.
template <typename F>
bool with_number(Type type, const std::byte* from, F&& f) {
  switch (type) {
    case Type::boolean:
    case Type::uint8:
      return f(load<uint8_t>(from));
    case Type::uint16:
      return f(load<uint16_t>(from));
    case Type::uint32:
      return f(load<uint32_t>(from));
    case Type::uint64:
      return f(load<uint64_t>(from));
    case Type::int8:
      return f(load<int8_t>(from));
    case Type::int16:
      return f(load<int16_t>(from));
    case Type::int32:
      return f(load<int32_t>(from));
    case Type::int64:
      return f(load<int64_t>(from));
    case Type::float32:
      return f(load<float>(from));
    case Type::float16:
      return f(float_of(load<uint16_t>(from)));
    case Type::float64:
      break;
  }
  return f(load<double>(from));
}

// Whether the number was one of T, and was written. Floating-point numbers are rounded, but not to
// infinity.
template <typename To>
bool store(auto number, std::byte* out) {
  using From = decltype(number);
  if constexpr (std::is_integral_v<To>) {
    if constexpr (std::is_integral_v<From>) {
      if (!std::in_range<To>(number)) return false;
    } else {
      // The limit itself may not be a number of From; one step further always is.
      const double limit = std::ldexp(1.0, std::numeric_limits<To>::digits);
      const auto value = static_cast<double>(number);
      if (value != std::trunc(value) || !(value < limit) ||
          !(value >= (std::is_signed_v<To> ? -limit : 0.0))) {
        return false;
      }
    }
  }
  const auto value = static_cast<To>(number);
  if constexpr (std::is_same_v<To, float> && std::is_same_v<From, double>) {
    if (std::isinf(value) && std::isfinite(number)) return false;
  }
  std::memcpy(out, &value, sizeof value);
  return true;
}

bool store_half(auto number, std::byte* out) {
  const uint16_t half = half_of(static_cast<float>(number));
  if (std::isinf(float_of(half)) && std::isfinite(static_cast<double>(number))) return false;
  return store<uint16_t>(half, out);
}

bool store_as(Type type, auto number, std::byte* out) {
  switch (type) {
    case Type::boolean:
      return (number == 0 || number == 1) && store<uint8_t>(number, out);
    case Type::uint8:
      return store<uint8_t>(number, out);
    case Type::uint16:
      return store<uint16_t>(number, out);
    case Type::uint32:
      return store<uint32_t>(number, out);
    case Type::uint64:
      return store<uint64_t>(number, out);
    case Type::int8:
      return store<int8_t>(number, out);
    case Type::int16:
      return store<int16_t>(number, out);
    case Type::int32:
      return store<int32_t>(number, out);
    case Type::int64:
      return store<int64_t>(number, out);
    case Type::float16:
      return store_half(number, out);
    case Type::float32:
      return store<float>(number, out);
    case Type::float64:
      break;
  }
  return store<double>(number, out);
}

// A number that is stored as another format has it.
Decoded decode_coded(const Scalar& kind, std::span<const std::byte> bytes, const Destination& to) {
  auto numbers = kind.codec == Scalar::Codec::varint ? parse_varints(bytes, kind.type)
                                                     : parse_msgpack(bytes, kind.type, {});
  if (!numbers) return numbers.error();
  const std::vector<std::byte>& values = numbers.value().values;
  const bool list = kind.codec == Scalar::Codec::msgpack && numbers.value().dims != 0;
  if (list || values.size() != size_of(kind.type)) {
    return damaged(std::to_string(values.size() / size_of(kind.type)) + " numbers, not one");
  }
  std::memcpy(to.dense.data(), values.data(), values.size());
  return std::monostate{};
}

std::string number_text(double value) {
  std::string text = std::to_string(value);
  if (std::isnan(value)) text = "NaN";
  return text;
}

// What a box or a keypoint may not be; empty if it is sound.
std::string fault_of(const Array& kind, const float* row, size_t width) {
  const bool points = kind.meaning == Array::Meaning::keypoints;
  const size_t coordinates = points ? 2 : 4;
  // Half a pixel of the largest image, for numbers that were rounded.
  constexpr float kSlack = 1.0f / 65536;
  for (size_t i = 0; i < width; ++i) {
    if (!std::isfinite(row[i])) return number_text(row[i]);
    if (kind.normalised && i < coordinates && !(row[i] >= -kSlack && row[i] <= 1 + kSlack)) {
      return number_text(row[i]) + ", which is not between 0 and 1";
    }
  }
  if (points) return {};
  const bool corners = kind.meaning == Array::Meaning::xyxy;
  const float w = corners ? row[2] - row[0] : row[2], h = corners ? row[3] - row[1] : row[3];
  if (w < 0 || h < 0) return "a size of " + number_text(w) + " x " + number_text(h);
  return {};
}

Decoded check_meaning(const Array& kind, const std::byte* values, uint64_t bytes) {
  if (kind.meaning == Array::Meaning::none) return std::monostate{};
  const auto width = static_cast<size_t>(kind.shape.back());
  const uint64_t rows = bytes / (sizeof(float) * width);
  for (uint64_t r = 0; r < rows; ++r) {
    std::array<float, 4> row{};
    std::memcpy(row.data(), values + r * width * sizeof(float), width * sizeof(float));
    const std::string fault = fault_of(kind, row.data(), width);
    if (!fault.empty()) {
      const bool points = kind.meaning == Array::Meaning::keypoints;
      return damaged((points ? "point " : "box ") + std::to_string(r) + " has " + fault);
    }
  }
  return std::monostate{};
}

// The shape of raw bytes: what is ragged follows from their number.
Result<std::array<int64_t, kMostDims>> raw_shape(const Array& kind, uint64_t size) {
  std::array<int64_t, kMostDims> shape{};
  uint64_t known = size_of(kind.type);
  size_t open = kMostDims;
  for (size_t d = 0; d < kind.shape.size(); ++d) {
    shape[d] = kind.shape[d];
    if (kind.shape[d] == kRagged) {
      open = d;
    } else {
      known *= static_cast<uint64_t>(kind.shape[d]);
    }
  }
  const bool good = open == kMostDims ? size == known : size % known == 0;
  if (!good) {
    return damaged(std::to_string(size) + " bytes are no " + std::string(name_of(kind.type)) +
                   " array of shape " + text_of(kind.shape));
  }
  if (open != kMostDims) shape[open] = static_cast<int64_t>(size / known);
  return shape;
}

int16_t pcm16(float value) {
  // Of float32 files values beyond 1 may come; NaN is silence.
  const float scaled = std::nearbyint(value * 32768.0f);
  return static_cast<int16_t>(scaled != scaled ? 0.0f : std::clamp(scaled, -32768.0f, 32767.0f));
}

// The first `frames` frames of a file, by pieces that a cache holds: read(first, out) gives values of
// all its channels, and is called for one piece after the other, until it is false.
void write_sound(const Audio& kind, uint32_t channels, uint64_t frames, std::byte* out,
                 auto&& read) {
  std::array<float, 4096> piece;
  const uint64_t most = piece.size() / channels;
  for (uint64_t begin = 0; begin < frames; begin += most) {
    const uint64_t count = std::min(most, frames - begin);
    if (!read(begin * channels, std::span(piece).first(count * channels))) return;
    if (kind.channels == 1 && channels > 1) {
      for (uint64_t f = 0; f < count; ++f) {
        float sum = 0;
        for (uint32_t c = 0; c < channels; ++c) sum += piece[f * channels + c];
        piece[f] = sum / static_cast<float>(channels);
      }
    }
    const uint64_t values = count * kind.channels;
    if (kind.type == Type::float32) {
      std::memcpy(out, piece.data(), values * sizeof(float));
    } else {
      for (uint64_t i = 0; i < values; ++i)
        store<int16_t>(pcm16(piece[i]), out + i * sizeof(int16_t));
    }
    out += values * size_of(kind.type);
  }
}

}  // namespace

std::byte* Destination::begin(std::span<const int64_t> shape, size_t value_bytes) const {
  if (!ragged) return dense.data();
  std::byte* memory = holder->take(value_bytes);
  *ragged = {memory, value_bytes, {}};
  std::copy(shape.begin(), shape.end(), ragged->shape.begin());
  return memory;
}

bool store_number(Type type, int64_t number, std::byte* out) { return store_as(type, number, out); }
bool store_number(Type type, uint64_t number, std::byte* out) {
  return store_as(type, number, out);
}
bool store_number(Type type, double number, std::byte* out) { return store_as(type, number, out); }

Decoded decode(const Image& kind, const Output&, std::span<const std::byte> bytes,
               const image::SampleKey& key, Scratch& scratch, const Destination& to) {
  return kind.pipeline->apply(bytes, key, scratch.image, to.dense);
}

Decoded decode(const Bytes&, const Output&, std::span<const std::byte> bytes,
               const image::SampleKey&, Scratch&, const Destination& to) {
  return copy_bytes(bytes, to);
}

Decoded decode(const Text& kind, const Output&, std::span<const std::byte> bytes,
               const image::SampleKey&, Scratch&, const Destination& to) {
  if (kind.json) {
    auto good = check_json(bytes);
    if (!good) return good.error();
  } else if (const size_t good = valid_utf8(bytes); good != bytes.size()) {
    return damaged("its byte " + std::to_string(good) + " is not UTF-8");
  }
  return copy_bytes(bytes, to);
}

Decoded decode(const Scalar& kind, const Output&, std::span<const std::byte> bytes,
               const image::SampleKey&, Scratch&, const Destination& to) {
  if (kind.codec == Scalar::Codec::decimal) return parse_number(bytes, kind.type, to.dense.data());
  if (kind.codec != Scalar::Codec::raw) return decode_coded(kind, bytes, to);
  const Type stored = kind.stored.value_or(kind.type);
  if (bytes.size() != size_of(stored)) {
    return damaged(std::to_string(bytes.size()) + " bytes are no number of type " +
                   std::string(name_of(stored)));
  }
  if (stored == kind.type) {
    if (stored == Type::boolean && !booleans(bytes)) return damaged("a bool that is not 0 or 1");
    std::memcpy(to.dense.data(), bytes.data(), bytes.size());
    return std::monostate{};
  }
  const bool good = with_number(stored, bytes.data(), [&](auto number) {
    return store_as(kind.type, number, to.dense.data());
  });
  if (!good) return damaged("its number is none of type " + std::string(name_of(kind.type)));
  return std::monostate{};
}

Result<ArrayValues> read_array(const Array& kind, std::span<const std::byte> bytes) {
  const auto no_such = [&](Type type, std::span<const int64_t> shape) {
    return damaged("it is " + std::string(name_of(type)) + " of shape " + text_of(shape) +
                   ", not " + std::string(name_of(kind.type)) + " of shape " + text_of(kind.shape));
  };
  ArrayValues array;
  array.values = bytes;
  if (kind.codec == Array::Codec::npy) {
    auto npy = parse_npy(bytes);
    if (!npy) return npy.error();
    const std::span<const int64_t> found(npy.value().shape.data(), npy.value().dims);
    if (npy.value().type != kind.type || !fits(found, kind.shape)) {
      return no_such(npy.value().type, found);
    }
    array.shape = npy.value().shape;
    array.values = npy.value().values;
    if (npy.value().fortran || npy.value().big_endian) {
      array.converted.resize(array.values.size());
      put_in_order(npy.value(), array.converted.data());
      array.values = array.converted;
    }
  } else if (kind.codec == Array::Codec::msgpack) {
    auto numbers = parse_msgpack(bytes, kind.type, kind.shape);
    if (!numbers) return numbers.error();
    const std::span<const int64_t> found(numbers.value().shape.data(), numbers.value().dims);
    if (!fits(found, kind.shape)) return no_such(kind.type, found);
    array.shape = numbers.value().shape;
    array.converted = std::move(numbers.value().values);
    array.values = array.converted;
  } else {
    if (kind.codec == Array::Codec::varint) {
      auto numbers = parse_varints(bytes, kind.type);
      if (!numbers) return numbers.error();
      array.converted = std::move(numbers.value().values);
      array.values = array.converted;
    }
    auto found = raw_shape(kind, array.values.size());
    if (!found) return found.error();
    array.shape = found.value();
  }
  if (kind.type == Type::boolean && !booleans(array.values)) {
    return damaged("a bool that is not 0 or 1");
  }
  return array;
}

Decoded decode_rows(const Array& kind, std::span<const std::byte> bytes, const Scratch::Rows& boxes,
                    const Destination& to) {
  auto read = read_array(kind, bytes);
  if (!read) return read.error();
  auto& shape = read.value().shape;
  const std::span<const std::byte> values = read.value().values;
  const auto rows = static_cast<uint64_t>(shape[0]);
  if (rows != boxes.before) {
    return damaged(std::to_string(rows) + " rows for " + std::to_string(boxes.before) + " boxes");
  }
  const size_t row = rows == 0 ? 0 : values.size() / rows;
  if (boxes.moved) shape[0] = static_cast<int64_t>(boxes.kept.size());
  const size_t size = row * static_cast<size_t>(shape[0]);
  std::byte* out = to.begin({shape.data(), kind.shape.size()}, size);
  if (size == 0) return std::monostate{};
  if (!boxes.moved) {
    std::memcpy(out, values.data(), size);
    return std::monostate{};
  }
  for (const uint32_t kept : boxes.kept) {
    std::memcpy(out, values.data() + kept * row, row);
    out += row;
  }
  return std::monostate{};
}

Decoded decode(const Array& kind, const Output&, std::span<const std::byte> bytes,
               const image::SampleKey&, Scratch&, const Destination& to) {
  auto read = read_array(kind, bytes);
  if (!read) return read.error();
  const auto& shape = read.value().shape;
  const std::span<const std::byte> values = read.value().values;
  auto sound = check_meaning(kind, values.data(), values.size());
  if (!sound) return sound.error();
  std::byte* out = to.begin({shape.data(), kind.shape.size()}, values.size());
  if (!values.empty()) std::memcpy(out, values.data(), values.size());
  return std::monostate{};
}

Decoded decode(const Mask& kind, const Output& output, std::span<const std::byte> bytes,
               const image::SampleKey&, Scratch& scratch, const Destination& to) {
  auto decoded = image::decode_labels(bytes, kind.max_pixels, scratch.values);
  if (!decoded) return decoded.error();
  const image::Labels& labels = decoded.value();
  const std::array<int64_t, 2> shape{labels.height, labels.width};
  if (!fits(shape, output.shape)) {
    return damaged("a mask of " + text_of(shape) + " pixels, not " + text_of(output.shape));
  }
  const auto pixels = static_cast<size_t>(labels.width) * static_cast<size_t>(labels.height);
  const size_t stored = labels.wide ? 2 : 1, size = size_of(kind.type);
  std::byte* out = to.begin(shape, pixels * size);
  const Type from = labels.wide ? Type::uint16 : Type::uint8;
  if (from == kind.type) {
    std::memcpy(out, labels.values, pixels * size);
    return std::monostate{};
  }
  for (size_t i = 0; i < pixels; ++i) {
    const bool good = with_number(from, labels.values + i * stored, [&](auto number) {
      return store_as(kind.type, number, out + i * size);
    });
    if (!good) {
      return damaged("a label that is none of type " + std::string(name_of(kind.type)) +
                     ": ask for a wider one");
    }
  }
  return std::monostate{};
}

namespace {

// A place for the frames that are wanted of those that there are, filled up with zeros.
struct Sound {
  uint64_t there = 0;  // frames
  std::byte* out = nullptr;
};

Result<Sound> begin_sound(const Audio& kind, uint32_t rate, uint32_t channels, uint64_t has,
                          const Destination& to) {
  if (kind.rate != 0 && rate != kind.rate) {
    return damaged(std::to_string(rate) + " frames a second, not " + std::to_string(kind.rate));
  }
  if (kind.channels != 1 && channels != kind.channels) {
    return damaged(std::to_string(channels) + " channels, not " + std::to_string(kind.channels));
  }
  const uint64_t frames = kind.frames == 0 ? has : kind.frames;
  const uint64_t there = std::min(frames, has), width = size_of(kind.type) * kind.channels;
  const std::array<int64_t, 2> shape{static_cast<int64_t>(frames), kind.channels};
  std::byte* out = to.begin({shape.data(), kind.channels == 1 ? size_t{1} : 2}, frames * width);
  std::memset(out + there * width, 0, (frames - there) * width);
  return Sound{there, out};
}

Decoded decode_flac(const Audio& kind, std::span<const std::byte> bytes, Scratch& scratch,
                    const Destination& to) {
  const auto parsed = parse_flac(bytes, scratch.values);
  if (!parsed) return parsed.error();
  const Flac& flac = parsed.value();
  const auto begun = begin_sound(kind, flac.rate, flac.channels, flac.frames, to);
  if (!begun) return begun.error();
  FlacReader reader(flac, scratch.values);
  const auto read = [&](uint64_t, std::span<float> out) { return reader.read(out); };
  write_sound(kind, flac.channels, begun.value().there, begun.value().out, read);
  if (reader.error()) return *reader.error();
  return std::monostate{};
}

}  // namespace

Decoded decode(const Audio& kind, const Output&, std::span<const std::byte> bytes,
               const image::SampleKey&, Scratch& scratch, const Destination& to) {
  if (is_flac(bytes)) return decode_flac(kind, bytes, scratch, to);
  const auto parsed = parse_wav(bytes);
  if (!parsed) return parsed.error();
  const Wav& wav = parsed.value();
  const auto begun = begin_sound(kind, wav.rate, wav.channels, wav.frames, to);
  if (!begun) return begun.error();
  const auto [there, out] = begun.value();
  const bool same = wav.channels == kind.channels &&
                    ((kind.type == Type::int16 && wav.coding == Wav::Coding::pcm16) ||
                     (kind.type == Type::float32 && wav.coding == Wav::Coding::float32));
  if (!same) {
    write_sound(kind, wav.channels, there, out, [&](uint64_t first, std::span<float> piece) {
      wav.read(first, piece);
      return true;
    });
  } else if (there != 0) {
    std::memcpy(out, wav.values.data(), there * size_of(kind.type) * kind.channels);
  }
  return std::monostate{};
}

Decoded decode(const Custom& kind, const Output& output, std::span<const std::byte> bytes,
               const image::SampleKey& key, Scratch& scratch, const Destination& to) {
  SampleRandom random(key.seed ^ kDrawOfDecoders, key.epoch, key.sample);
  const uint64_t high = random.next();
  return kind.decoder->decode(
      bytes, high << 32 | random.next(), scratch.image,
      [&](std::span<const int64_t> shape, std::span<const std::byte> values) -> Decoded {
        uint64_t size = size_of(output.type);
        for (const int64_t side : shape) size *= static_cast<uint64_t>(side);
        if (!fits(shape, kind.shape) || values.size() != size) {
          return Error(ErrorKind::transform, "it was decoded to an array of shape " +
                                                 text_of(shape) + ", not " + text_of(kind.shape));
        }
        std::byte* out = to.begin(shape, values.size());
        if (!values.empty()) std::memcpy(out, values.data(), values.size());
        return std::monostate{};
      });
}

}  // namespace nostall::fields
