// Compiles fields to outputs, and applies them to one sample at a time. decode.h has the kinds;
// tail.cc puts ragged values together.
#include "fields/program.h"

#include <algorithm>
#include <new>

#include "fields/decode.h"
#include "fields/group.h"
#include "source/unit.h"

namespace nostall::fields {

Type type_of(image::Type type) {
  switch (type) {
    case image::Type::float16:
      return Type::float16;
    case image::Type::float32:
      return Type::float32;
    case image::Type::uint8:
      break;
  }
  return Type::uint8;
}

namespace {

[[noreturn]] void usage(const Field& field, const std::string& what) {
  throw Error(ErrorKind::usage, "field " + field.name + ": " + what);
}

// The type and shape of what each kind gives, with a check of its parameters.
class Compiler {
 public:
  explicit Compiler(const Field& field) : field_(field) {}

  Output operator()(const Image& image) {
    if (!image.pipeline) usage(field_, "an image needs transforms, or is given as bytes");
    const image::Output& o = image.pipeline->output();
    const int64_t h = o.height, w = o.width;
    return made(type_of(o.type), o.layout == image::Layout::chw ? std::vector<int64_t>{3, h, w}
                                                                : std::vector<int64_t>{h, w, 3});
  }
  Output operator()(const Bytes&) { return made(Type::uint8, {kRagged}); }
  Output operator()(const Text&) { return made(Type::uint8, {kRagged}); }
  Output operator()(const Scalar& scalar) { return made(scalar.type, {}); }
  Output operator()(const Array& array) {
    check_shape(array.shape);
    const auto ragged = std::count(array.shape.begin(), array.shape.end(), kRagged);
    const bool bare = array.codec == Array::Codec::raw || array.codec == Array::Codec::varint;
    if (bare && ragged > 1) {
      usage(field_, "raw bytes tell one ragged dimension, not " + std::to_string(ragged) +
                        ": store such arrays as .npy");
    }
    if (bare && ragged == 1 &&
        std::find(array.shape.begin(), array.shape.end(), 0) != array.shape.end()) {
      usage(field_, "raw bytes of a shape with a side of 0 do not tell its ragged dimension");
    }
    check_meaning(array);
    if (array.pipeline && array.meaning == Array::Meaning::none) {
      usage(field_, "transforms are for images, masks, boxes and keypoints");
    }
    const bool first_ragged = !array.shape.empty() && array.shape.front() == kRagged;
    if ((array.rows_of || array.pipeline) &&
        (!first_ragged || std::count(array.shape.begin(), array.shape.end(), kRagged) != 1)) {
      usage(field_, "of boxes, and of what goes with them, the first side alone is ragged");
    }
    return made(array.type, array.shape);
  }
  Output operator()(const Custom& custom) {
    if (!custom.decoder) usage(field_, "there is nothing that decodes it");
    check_shape(custom.shape);
    return made(custom.type, custom.shape);
  }
  Output operator()(const Mask& mask) {
    if (mask.pipeline) {
      if (!image_type_of(mask.type)) {
        usage(field_, "transforms give masks of uint8, uint16, int16, int32 or int64, not " +
                          std::string(name_of(mask.type)));
      }
      const image::Output& o = mask.pipeline->output();
      return made(mask.type, {o.height, o.width});
    }
    if (mask.type == Type::boolean || mask.type == Type::int8 || mask.type >= Type::float16) {
      usage(field_, "the labels of a mask are integers of 8 bits or more, not " +
                        std::string(name_of(mask.type)));
    }
    const auto side = [](uint32_t n) { return n == 0 ? kRagged : int64_t{n}; };
    return made(mask.type, {side(mask.height), side(mask.width)});
  }
  Output operator()(const Audio& audio) {
    if (audio.type != Type::float32 && audio.type != Type::int16) {
      usage(field_, "sound is float32 or int16, not " + std::string(name_of(audio.type)));
    }
    if (audio.channels == 0) usage(field_, "sound has at least one channel");
    const int64_t frames = audio.frames == 0 ? kRagged : static_cast<int64_t>(audio.frames);
    if (audio.channels == 1) return made(audio.type, {frames});
    return made(audio.type, {frames, audio.channels});
  }
  Output operator()(const Tokens& tokens) {
    const bool floating = tokens.type == Type::float32;
    if (tokens.type != Type::int32 && tokens.type != Type::int64 && !floating) {
      usage(field_, "tokens are int32 or int64, or numbers beside them float32, not " +
                        std::string(name_of(tokens.type)));
    }
    const auto integer = [](Type type) { return type != Type::boolean && type < Type::float16; };
    if (!integer(tokens.stored) && !(floating && tokens.stored == Type::float32)) {
      usage(field_, "tokens are stored as integers, not as " + std::string(name_of(tokens.stored)));
    }
    if (tokens.mask && (!integer(*tokens.mask) || tokens.part != Tokens::Part::labels)) {
      usage(field_, "a mask is of integers, and for labels");
    }
    if (tokens.length > source::kMostUnit) usage(field_, "a unit has at most 2^30 tokens");
    if (tokens.part == Tokens::Part::lengths) return made(Type::int32, {kRagged});
    return made(tokens.type, {tokens.length == 0 ? kRagged : static_cast<int64_t>(tokens.length)});
  }

 private:
  void check_shape(std::span<const int64_t> shape) const {
    if (shape.size() > kMostDims) {
      usage(field_, "an array has at most " + std::to_string(kMostDims) + " dimensions");
    }
    for (const int64_t side : shape) {
      if (side < 0 && side != kRagged) usage(field_, "a dimension of an array is negative");
    }
  }
  void check_meaning(const Array& array) const {
    using Meaning = Array::Meaning;
    if (array.meaning == Meaning::none) return;
    const int64_t last = array.shape.empty() ? 0 : array.shape.back();
    const bool points = array.meaning == Meaning::keypoints;
    const bool good = array.type == Type::float32 && array.shape.size() >= 2 &&
                      (points ? last == 2 || last == 3 : last == 4 && array.shape.size() == 2);
    if (!good)
      usage(field_, points ? "keypoints are float32 of shape (n, 2 or 3) or (n, k, 2 or 3)"
                           : "boxes are float32 of shape (n, 4)");
  }
  Output made(Type type, std::vector<int64_t> shape) const {
    const bool dense = std::find(shape.begin(), shape.end(), kRagged) == shape.end();
    const Form form = dense ? Form::dense : field_.padded ? Form::padded : Form::ragged;
    return {field_.name, type, std::move(shape), form};
  }
  const Field& field_;
};

bool follows(const Field& field) {
  const auto* array = std::get_if<Array>(&field.kind);
  return array != nullptr && array->rows_of.has_value();
}

void check_size(const Field& field, const Output& output) {
  constexpr uint64_t kMost = uint64_t{1} << 40;
  uint64_t bytes = size_of(output.type);
  for (const int64_t side : output.shape) {
    if (side != kRagged &&
        (__builtin_mul_overflow(bytes, static_cast<uint64_t>(side), &bytes) || bytes > kMost)) {
      usage(field, "one sample of it would have more than a tebibyte");
    }
  }
}

uint64_t aligned(uint64_t bytes) {
  return (bytes + Program::kAlignment - 1) / Program::kAlignment * Program::kAlignment;
}

}  // namespace

void Scratch::trim(size_t most) noexcept {
  image.trim(most);
  small_values =
      values.take_used() > most ? 0 : std::min(small_values + 1, image::Scratch::kSmallImages);
  if (small_values >= image::Scratch::kSmallImages && values.size() > most) values.release();
}

void Scratch::release_above(size_t most) noexcept {
  image.release_above(most);
  if (values.size() > most) values.release();
}

Program Program::compile(std::vector<Field> fields, std::optional<BatchMix> mix) {
  if (fields.empty()) throw Error(ErrorKind::usage, "a batch needs at least one field");
  Program program;
  for (const Field& field : fields) {
    program.outputs_.push_back(std::visit(Compiler(field), field.kind));
    check_size(field, program.outputs_.back());
    if (program.outputs_.back().form != Form::dense) ++program.ragged_;
  }
  program.fields_ = std::move(fields);
  program.find_groups();
  program.mix_ = std::move(mix);
  program.check_mix();
  return program;
}

Program Program::of_image(image::Pipeline pipeline) {
  Field field;
  field.kind = Image{std::make_shared<const image::Pipeline>(std::move(pipeline))};
  return compile({std::move(field)});
}

uint64_t Program::slab_bytes(uint64_t samples) const noexcept {
  return region(outputs_.size(), samples);
}

uint64_t Program::region(size_t output, uint64_t samples) const noexcept {
  uint64_t begin = 0, end = 0;
  for (size_t i = 0; i < output; ++i) {
    if (outputs_[i].form != Form::dense) continue;
    end = begin + samples * outputs_[i].bytes();
    begin = aligned(end);
  }
  // The last region ends with its values.
  return output == outputs_.size() ? end : begin;
}

size_t Program::ragged_before(size_t output) const noexcept {
  return static_cast<size_t>(std::count_if(outputs_.begin(),
                                           outputs_.begin() + static_cast<ptrdiff_t>(output),
                                           [](const Output& o) { return o.form != Form::dense; }));
}

bool Program::light() const noexcept {
  return std::all_of(fields_.begin(), fields_.end(), [](const Field& f) {
    return std::holds_alternative<Tokens>(f.kind) || std::holds_alternative<Scalar>(f.kind);
  });
}

Destination Program::destination(size_t output, const Place& place) const {
  if (outputs_[output].form == Form::dense) {
    const size_t size = outputs_[output].bytes();
    return {
        {place.slab + region(output, place.samples) + place.index * size, size}, nullptr, nullptr};
  }
  return {{}, &place.ragged[ragged_before(output)], place.holder};
}

Result<std::monostate> Program::apply(std::span<const source::FieldBytes> located,
                                      const image::SampleKey& key, Scratch& scratch,
                                      const Place& place) const try {
  scratch.rows.resize(fields_.size());
  bool follow = false;
  for (size_t i = 0; i < fields_.size(); ++i) {
    if (grouped_[i] != 0) continue;
    if (follows(fields_[i])) {
      follow = true;
      continue;
    }
    auto bytes = bytes_of(fields_[i], located);
    if (!bytes) return bytes.error();
    const auto result = std::visit(
        [&](const auto& kind) {
          return decode(kind, outputs_[i], bytes.value(), key, scratch, destination(i, place));
        },
        fields_[i].kind);
    if (!result) return failed(fields_[i], result.error().what(), result.error().kind());
  }
  for (const Group& group : groups_) {
    auto result = apply_group(group, located, key, scratch, place);
    if (!result) return result;
  }
  // Behind the boxes that they go with.
  for (size_t i = 0; follow && i < fields_.size(); ++i) {
    if (!follows(fields_[i])) continue;
    const Array& array = std::get<Array>(fields_[i].kind);
    const size_t boxes = *array.rows_of;
    Scratch::Rows& rows = scratch.rows[boxes];
    if (grouped_[boxes] == 0) {
      rows.moved = false;
      rows.before = static_cast<uint64_t>(place.ragged[ragged_before(boxes)].shape[0]);
    }
    auto bytes = bytes_of(fields_[i], located);
    if (!bytes) return bytes.error();
    const auto result = decode_rows(array, bytes.value(), rows, destination(i, place));
    if (!result) return failed(fields_[i], result.error().what(), result.error().kind());
  }
  return std::monostate{};
} catch (const std::bad_alloc&) {
  return no_memory_to_unpack();
}

}  // namespace nostall::fields
