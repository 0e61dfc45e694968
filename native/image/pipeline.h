// image/pipeline.h - from an encoded image to its place in the batch, in one pass. Read this first.
//
// A Pipeline is compiled once from a list of steps (steps.h) with torchvision's semantics and
// parameters, then applied from many threads. For each sample the steps become plain actions
// (draw.h); every draw is a function of (seed, epoch, sample), see base/random.h. Decoding,
// cropping and scaling are planned together: only the region that survives is decoded, at the
// smallest DCT scale that does not harm the result. Colour and warps then touch that region alone,
// with Pillow's arithmetic. Flip, conversion, normalisation and layout are one last pass that
// writes into the batch. A sample with masks, boxes or keypoints is a Record (targets.h).
// Thread-safety: Pipeline is immutable; each thread brings its own Scratch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "base/error.h"
#include "image/bitmap.h"
#include "image/draw.h"
#include "image/pixels.h"
#include "image/steps.h"
#include "image/targets.h"

namespace nostall::image {

enum class Type : uint8_t { uint8, float16, float32 };
enum class Layout : uint8_t { chw, hwc };

struct Output {
  uint32_t height = 0, width = 0;  // channels are always 3 (RGB)
  Type type = Type::uint8;
  Layout layout = Layout::hwc;
  size_t bytes() const noexcept;
};

struct Options {
  // Without ToTensor the default is uint8 HWC, with it float32 CHW; these override.
  std::optional<Type> type;
  std::optional<Layout> layout;
  uint64_t max_pixels = 178'956'970;  // larger headers are refused: twice Pillow's bomb warning
  std::optional<Pixels> pixels;       // samples are such pixels, not encoded images
};

// Decoders and buffers that one thread reuses from image to image. It is constructed by that thread,
// while no other one changes the environment: image/decode.h says why.
class Scratch {
 public:
  explicit Scratch(HeldBytes* counted = nullptr);  // which outlives it
  ~Scratch();
  Scratch(Scratch&&) noexcept;
  Scratch& operator=(Scratch&&) noexcept;
  // Bytes that are held for the next image.
  size_t bytes() const noexcept;
  // Called after each image. Gives all of them back if they are more than `most` and the last
  // kSmallImages needed no more: one large image must not cost its memory for the rest of the job,
  // nor must each of many large ones be given memory anew.
  void trim(size_t most) noexcept;
  // Gives all of them back if they are more than `most`; for a thread without work.
  void release_above(size_t most) noexcept;
  static constexpr int kSmallImages = 32;
  static constexpr size_t kKept = size_t{16} << 20;  // `most` outside of a loader
  struct Impl;
  Impl& impl() noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

struct SampleKey {
  uint64_t seed = 0;
  uint32_t epoch = 0;
  uint64_t sample = 0;
};

class Pipeline {
 public:
  // Throws Error(usage) if the steps cannot give images of one fixed size.
  static Pipeline compile(std::span<const Step> steps, const Options& options = {});

  const Output& output() const noexcept;
  uint32_t draws() const;  // of a sample's generator
  // Decodes and transforms one encoded image (of the formats of decode.h, recognised by their first bytes),
  // or one of Options::pixels, into `out`, output().bytes() long. Total: any bytes give an image or
  // an Error of kind corruption; a truncated image is an error, never half grey. `out` is
  // unspecified after an error.
  Result<std::monostate> apply(std::span<const std::byte> encoded, const SampleKey& key,
                               Scratch& scratch, std::span<std::byte> out) const;

  // The same for a sample of several parts, of which `out` places are given; sets the boxes' counts.
  // Also an Error of kind corruption: pictures of different sizes, values of a mask that its type
  // cannot hold, coordinates that are no numbers. Of kind usage: no picture, places of wrong size.
  Result<std::monostate> apply_record(const Record& record, const SampleKey& key,
                                      Scratch& scratch) const;

  // What the steps are for a sample of `width` x `height`: a name and numbers for each action.
  Result<std::vector<Description>> drawn(const SampleKey& key, int64_t width, int64_t height) const;

  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;
  ~Pipeline();

  struct Impl;

 private:
  explicit Pipeline(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

// A full decode to RGB, HWC, uint8: for transforms written in Python.
struct Decoded {
  uint32_t height = 0, width = 0;
  std::vector<uint8_t> rgb;
};
Result<Decoded> decode_rgb(std::span<const std::byte> encoded, const Options& options,
                           Scratch& scratch);

}  // namespace nostall::image
