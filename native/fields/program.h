// fields/program.h - from the record of a sample to its values in a batch. Read this first.
//
// A source says where the fields of a sample lie in its record (source.h, locate()). A Program says
// what they are. It is compiled once from a list of fields, each with its kind and parameters. For
// each sample it decodes every field and writes the values of dense outputs straight to their place
// in the batch's slab. Values of ragged outputs, whose sizes differ from sample to sample, are held
// until the batch is complete; then plan_tail() and lay_tail() put them one after the other, or pad
// them to the longest.
//
// Fields of kinds Image, Mask and Array (boxes, keypoints) that share a pipeline are a group: they are
// transformed as one (image/targets.h), with one draw of its steps.
//
//   slab of a batch of n samples: one region for each dense output, aligned to kAlignment bytes
//   tail: for each ragged output its values, then its offsets or lengths, then (where more than the
//   first dimension is ragged) the shapes of all samples
//
// Units: bytes, unless a name says otherwise. Randomness: draws depend on the SampleKey alone, so
// that all images of a sample have the same ones. Thread-safety: a Program is immutable; each thread
// brings its own Scratch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/error.h"
#include "fields/types.h"
#include "image/mix.h"
#include "image/pipeline.h"
#include "source/source.h"

namespace nostall::fields {

// ---- The kinds of fields, and what the bytes of each must be.

// An encoded image (or pixels, if the pipeline says so): dense, as the pipeline gives it. All images
// of a group must have one size.
struct Image {
  std::shared_ptr<const image::Pipeline> pipeline;
};
// Anything: uint8, (bytes,), ragged.
struct Bytes {};
// UTF-8: as Bytes, checked. JSON: UTF-8 too.
struct Text {
  bool json = false;
};
// One number: dense. A varint is a signed one of protocol buffers.
struct Scalar {
  enum class Codec : uint8_t { raw, decimal, varint, msgpack };
  Type type = Type::int64;
  Codec codec = Codec::raw;
  std::optional<Type> stored;  // of raw bytes; if absent, `type`
};
// Numbers of one type. `raw` values and varints have no header: their number gives one ragged
// dimension at most. A .npy array must have the type and the shape, lists of MessagePack the shape.
struct Array {
  enum class Codec : uint8_t { raw, npy, varint, msgpack };
  // What the numbers mean, checked: none may be NaN or infinite, if they mean anything.
  enum class Meaning : uint8_t {
    none,
    xyxy,       // boxes (n, 4): left, top, right, bottom; right >= left, bottom >= top
    xywh,       // boxes (n, 4): left, top, width, height; neither negative
    cxcywh,     // boxes (n, 4): centre, width, height; neither negative
    keypoints,  // (n, ..., 2 or 3): x, y and perhaps visibility
  };
  Type type = Type::float32;
  std::vector<int64_t> shape{};  // with kRagged
  Codec codec = Codec::raw;
  Meaning meaning = Meaning::none;
  bool normalised = false;  // coordinates are parts of the image: between 0 and 1
  // Boxes and keypoints: of the group that they belong to; null: they stay as they are stored. In a
  // group the pipeline checks them.
  std::shared_ptr<const image::Pipeline> pipeline{};
  // Row i belongs to box i of the boxes that are that field of the program, and goes with it: there
  // must be as many rows as boxes.
  std::optional<uint32_t> rows_of{};
};
// A PNG image of integers (image/labels.h): (height, width), ragged where they are 0. In a group it
// has the size of the pipeline's images instead.
struct Mask {
  Type type = Type::uint8;
  uint32_t height = 0, width = 0;
  uint64_t max_pixels = image::Options{}.max_pixels;
  std::shared_ptr<const image::Pipeline> pipeline{};
};
// A WAV or FLAC file (wav.h, flac.h): (frames,) if there is one channel, else (frames, channels).
struct Audio {
  Type type = Type::float32;  // or int16
  uint32_t channels = 1;      // 1: the mean of those that there are; else those, exactly
  uint32_t rate = 0;          // frames per second that every sample must have; 0: any
  uint64_t frames = 0;        // cut there, or filled up with zeros; 0: ragged
};
// A part of a unit of tokens (source/unit.h), or of numbers that lie beside its ids, one for each.
struct Tokens {
  enum class Part : uint8_t {
    ids,        // or other numbers
    labels,     // the one behind each, `ignored` behind the last one of a document
    positions,  // in the segment, from 0
    segments,   // the segment's number in the unit, from 1; 0 where the unit is filled up
    lengths,    // of the segments, then of what is filled up: int32, (n,), ragged
  };
  Part part = Part::ids;
  Type type = Type::int64;     // or int32, float32
  Type stored = Type::uint16;  // of integers; float32 where `type` is
  uint64_t length = 0;         // tokens of every unit, filled up with `pad`; 0: ragged
  int64_t pad = 0, ignored = -100;
  uint64_t vocabulary = 0;  // ids below it, and `ignored`, alone are sound; 0: any
  // Of labels: the record of a mask lies behind that of the ids, stored so. A label is `ignored` where
  // the mask is 0.
  std::optional<Type> mask{};
};

// What the stored bytes of a kind of the user's own stand for. Called from many threads at once.
class Decoder {
 public:
  virtual ~Decoder() = default;
  // Takes a value's shape, and its numbers in C order, for as long as the call lasts.
  using Take = std::function<Result<std::monostate>(std::span<const int64_t> shape,
                                                    std::span<const std::byte> values)>;
  // Gives the value to `take`, and returns what that returns. `draw` is random and the sample's alone.
  // `scratch` is the calling thread's. Error(corruption): `stored` is damaged; Error(transform): the
  // decoder failed.
  virtual Result<std::monostate> decode(std::span<const std::byte> stored, uint64_t draw,
                                        image::Scratch& scratch, const Take& take) const = 0;
};

// The type of a field whose numbers a pipeline makes.
Type type_of(image::Type type);

// What a decoder gives: of one type and shape.
struct Custom {
  Type type = Type::float32;
  std::vector<int64_t> shape{};  // with kRagged
  std::shared_ptr<const Decoder> decoder{};
};

struct Field {
  std::string name;    // in messages and outputs; may be empty if there is one field
  uint32_t index = 0;  // among Source::locate()'s
  std::variant<Image, Bytes, Text, Scalar, Array, Mask, Audio, Tokens, Custom> kind{};
  bool padded = false;  // instead of ragged, where the sizes differ
  // What stands for a missing value, as it would be stored; absent: a sample without it is unusable.
  std::optional<std::vector<std::byte>> fill{};
};

// What is mixed when a batch is complete (image/mix.h).
struct BatchMix {
  image::Mixing mixing;
  std::vector<uint32_t> images;    // fields: images of one group
  std::optional<uint32_t> labels;  // a field of integers; absent: the labels of the source
  bool draws_only = false;         // `images` are mixed by what takes the batch
};

// ---- What is decoded.

// Buffers that one thread reuses from sample to sample.
struct Scratch {
  explicit Scratch(image::HeldBytes* counted = nullptr, size_t fields = 0)
      : image(counted), values(counted), located(fields) {}
  // As of image::Scratch.
  void trim(size_t most) noexcept;
  void release_above(size_t most) noexcept;
  image::Scratch image;
  image::Buffer values;  // of masks and sound
  int small_values = 0;  // samples in a row that needed little of it
  std::vector<source::FieldBytes> located;
  // Of groups, whose parts are gathered first.
  struct Gathered {
    std::vector<image::Picture> pictures;
    std::vector<image::Mask> masks;
    std::vector<image::Boxes> boxes;
    std::vector<image::Keypoints> keypoints;
    std::vector<size_t> field_of_boxes;
  } gathered;
  struct Rows {
    std::vector<float> values;   // aligned, as those of a record need not be
    std::vector<uint32_t> kept;  // rows that stayed
    uint64_t before = 0;         // rows that there were
    bool moved = false;          // rows were taken out: `kept` has the others
  };
  std::vector<Rows> rows;  // of each field
};

// The value of one ragged output of one sample.
struct Ragged {
  const std::byte* values = nullptr;
  uint64_t bytes = 0;
  std::array<int64_t, kMostDims> shape{};
};

// Memory for ragged values of one batch; take() may be called from many threads.
class Holder {
 public:
  virtual ~Holder() = default;
  virtual std::byte* take(size_t bytes) = 0;  // throws std::bad_alloc
};

// A sample's place in its batch.
struct Place {
  std::byte* slab = nullptr;
  uint64_t samples = 0, index = 0;  // of the batch; of the sample in it
  std::span<Ragged> ragged{};       // one for each ragged output, in their order
  Holder* holder = nullptr;         // used if there are ragged outputs
};

// Where a ragged output of a batch lies in its tail. Offsets, lengths and shapes are int64.
struct Laid {
  uint64_t values = 0;         // offsets of bytes in the tail
  std::vector<int64_t> shape;  // of `values`
  uint64_t counts = 0;         // (n + 1,) offsets of a ragged one, (n, ...) lengths of a padded
  std::vector<int64_t> counts_shape;
  uint64_t shapes = 0;  // ragged, not by rows: (n, dimensions)
};

struct Destination;  // decode.h

class Program {
 public:
  static constexpr size_t kAlignment = 64;

  // Throws Error(usage), with the field's name, if a field cannot be so.
  static Program compile(std::vector<Field> fields, std::optional<BatchMix> mix = std::nullopt);
  // Of one image, the first field of its source.
  static Program of_image(image::Pipeline pipeline);

  const std::vector<Field>& fields() const noexcept { return fields_; }
  // In the order of the fields, one each; behind them the targets of a mix that has classes.
  const std::vector<Output>& outputs() const noexcept { return outputs_; }
  size_t ragged() const noexcept { return ragged_; }   // how many outputs are not dense
  size_t ragged_before(size_t output) const noexcept;  // among the first `output` ones

  // Bytes of the slab of a batch, and where the region of a dense output begins in it.
  uint64_t slab_bytes(uint64_t samples) const noexcept;
  uint64_t region(size_t output, uint64_t samples) const noexcept;

  // Decodes one sample into its place. Total: any bytes give values or an Error of kind corruption
  // that names the field, or of kind transform if a Decoder failed; the sample's place is unspecified
  // then.
  Result<std::monostate> apply(std::span<const source::FieldBytes> located,
                               const image::SampleKey& key, Scratch& scratch,
                               const Place& place) const;

  // Whether unpacking a sample costs little more than a copy of its bytes.
  bool light() const noexcept;
  bool mixes() const noexcept { return mix_.has_value(); }
  // Mixes a batch of which all samples are in their places; `labels` are those of its source, one for
  // each. An Error of kind usage for a label that is no class, with the sample's name by `describe`.
  Result<image::Mixture> mix(std::byte* slab, std::span<const int64_t> labels, uint64_t seed,
                             uint32_t epoch, uint64_t batch,
                             const std::function<std::string(size_t)>& describe) const;

  // The layout of the tail of a batch; `held` has ragged() values for each sample. `bytes` is its
  // size. Throws std::bad_alloc if there can be no such memory.
  std::vector<Laid> plan_tail(std::span<const Ragged> held, uint64_t samples,
                              uint64_t& bytes) const;
  void lay_tail(std::span<const Ragged> held, uint64_t samples, std::span<const Laid> laid,
                std::byte* tail) const;
  // Bytes of the tail that are zeros behind values, and the sample with the longest side in the output
  // with the most of them.
  struct Padding {
    uint64_t bytes = 0;
    uint64_t sample = 0;  // of the batch
    std::string field, shape;
  };
  Padding padding(std::span<const Ragged> held, uint64_t samples, std::span<const Laid> laid) const;

 private:
  struct Group {
    std::shared_ptr<const image::Pipeline> pipeline;
    std::vector<size_t> fields;  // two or more
  };
  void find_groups();
  void check_mix();
  Destination destination(size_t output, const Place& place) const;
  Result<std::monostate> apply_group(const Group& group,
                                     std::span<const source::FieldBytes> located,
                                     const image::SampleKey& key, Scratch& scratch,
                                     const Place& place) const;

  std::vector<Field> fields_;
  std::vector<Output> outputs_;
  std::vector<Group> groups_;
  std::vector<uint8_t> grouped_;  // whether a field is in one
  std::optional<BatchMix> mix_;
  size_t ragged_ = 0;
};

}  // namespace nostall::fields
