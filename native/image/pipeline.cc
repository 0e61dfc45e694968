// Applies a compiled list of steps to one sample at a time.
//
// The first picture's header gives the size of the canvas; then the sample's draws make actions of
// the steps. Runs of crops, resizes and flips are folded into stages. The first stage's box, and how
// far it is scaled down, decide which region is decoded, and at which DCT scale. Other actions change
// the whole canvas, as large as it is then. The last stage's rows go through flips, conversion and
// normalisation straight into the batch, one row at a time.
#include "image/pipeline.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "image/color.h"
#include "image/compile.h"
#include "image/decode.h"
#include "image/finish.h"
#include "image/geometry.h"
#include "image/mask.h"
#include "image/points.h"
#include "image/stages.h"
#include "image/warp.h"

namespace nostall::image {
namespace {

size_t size_of(Type type) { return type == Type::float32 ? 4 : type == Type::float16 ? 2 : 1; }

// The canvas of a sample, and its actions once the first picture has given the size.
class Sample {
 public:
  Sample(const Pipeline::Impl& pipeline, const SampleKey& key) : pipeline_(pipeline), key_(key) {}

  // Of every picture, before its pixels are read.
  std::optional<Error> enter(int64_t width, int64_t height) {
    if (!drawing_) {
      auto drawn =
          draw(pipeline_.steps, width, height, SampleRandom(key_.seed, key_.epoch, key_.sample));
      if (!drawn) return drawn.error();
      drawing_ = std::move(drawn).take();
    } else if (width != drawing_->from_width || height != drawing_->from_height) {
      return Error(ErrorKind::corruption,
                   "a picture of " + std::to_string(height) + "x" + std::to_string(width) +
                       " in a sample whose first has " + std::to_string(drawing_->from_height) +
                       "x" + std::to_string(drawing_->from_width) +
                       ": all pictures and masks of a sample must have one size");
    }
    return std::nullopt;
  }
  bool entered() const { return drawing_.has_value(); }
  const Drawing& drawing() const { return *drawing_; }

 private:
  const Pipeline::Impl& pipeline_;
  SampleKey key_;
  std::optional<Drawing> drawing_;
};

}  // namespace

size_t Output::bytes() const noexcept { return size_t{height} * width * 3 * size_of(type); }

struct Scratch::Impl {
  explicit Impl(HeldBytes* counted)
      : decoded(counted),
        middle{Buffer(counted), Buffer(counted)},
        line(counted),
        stage(counted),
        mask(counted) {}
  JpegDecoder jpeg;
  Buffer decoded, middle[2], line;
  StageBuffers stage;
  MaskBuffers mask;
  int small_images = 0;  // since the last large one
  std::array<Buffer*, 11> buffers() noexcept {
    return {&decoded,      &middle[0],    &middle[1],    &line,          &stage.narrow, &stage.row,
            &stage.padded, &mask.encoded, &mask.decoded, &mask.moved[0], &mask.moved[1]};
  }
};
Scratch::Scratch(HeldBytes* counted) : impl_(std::make_unique<Impl>(counted)) {}
Scratch::~Scratch() = default;
Scratch::Scratch(Scratch&&) noexcept = default;
Scratch& Scratch::operator=(Scratch&&) noexcept = default;
size_t Scratch::bytes() const noexcept {
  size_t bytes = 0;
  for (const Buffer* buffer : impl_->buffers()) bytes += buffer->size();
  return bytes;
}
void Scratch::trim(size_t most) noexcept {
  size_t used = 0;
  for (Buffer* buffer : impl_->buffers()) used += buffer->take_used();
  impl_->small_images = used > most ? 0 : std::min(impl_->small_images + 1, kSmallImages);
  if (impl_->small_images >= kSmallImages) release_above(most);
}

void Scratch::release_above(size_t most) noexcept {
  if (bytes() <= most) return;
  for (Buffer* buffer : impl_->buffers()) buffer->release();
}

namespace {

// One picture from its bytes to its place.
class ImageRun {
 public:
  ImageRun(const Pipeline::Impl& pipeline, Sample& sample, Scratch::Impl& scratch,
           std::span<std::byte> out)
      : pipeline_(pipeline), sample_(sample), s_(scratch), out_(out.data()) {}

  std::optional<Error> operator()(const Picture& picture) {
    const std::optional<Pixels>& pixels = picture.pixels ? picture.pixels : pipeline_.pixels;
    const auto plan = [this](int64_t width, int64_t height) { return enter(width, height); };
    if (pixels) plan(pixels->width, pixels->height);
    if (refused_) return refused_;
    const auto decoded =
        pixels ? unpack_pixels(picture.encoded, *pixels, s_.decoded)
               : decode(picture.encoded, pipeline_.max_pixels, plan, s_.jpeg, s_.decoded);
    if (!decoded) return decoded.error();
    if (refused_) return refused_;
    Bitmap bitmap = decoded.value();
    const std::vector<Action>& actions = sample_.drawing().actions;
    while (next_ < actions.size()) {
      if (!resample(bitmap, geometry_.stages.size())) return refused_;
      if (!change(bitmap)) return refused_;
      geometry_ = fold(actions, next_, bitmap.width, bitmap.height);
    }
    if (!resample(bitmap, geometry_.stages.size() - 1)) return refused_;
    const bool mirror_x = geometry_.mirror_x, mirror_y = geometry_.mirror_y;
    run(geometry_.stages.back(), bitmap, s_.stage, [&](int64_t y, const uint8_t* row) {
      store_row(pipeline_, y, row, mirror_x, mirror_y, s_.line, out_);
    });
    for (const Action& action : actions) {
      if (const auto* erased = std::get_if<Erase>(&action)) erase(pipeline_, *erased, out_);
    }
    return std::nullopt;
  }

 private:
  // Which region to decode; the decoder calls it when it has read the size.
  Wanted enter(int64_t width, int64_t height) {
    refused_ = sample_.enter(width, height);
    if (refused_) return {{0, 0, 1, 1}, 0};
    next_ = 0;
    geometry_ = fold(sample_.drawing().actions, next_, width, height);
    const Stage& first = geometry_.stages.front();
    return {support_of(first), shrink_of(first)};
  }

  bool fits(int64_t width, int64_t height) {
    if (static_cast<double>(width) * static_cast<double>(height) <=
        static_cast<double>(pipeline_.max_pixels)) {
      return true;
    }
    refused_ =
        Error(ErrorKind::corruption, "an image of so odd a shape that resizing it needs " +
                                         std::to_string(width) + "x" + std::to_string(height) +
                                         " pixels: raise max_pixels if it is genuine");
    return false;
  }

  // The next of two buffers: what the other holds stays.
  Buffer& other() {
    turn_ = !turn_;
    return s_.middle[turn_ ? 1 : 0];
  }
  Surface surface(int64_t width, int64_t height) {
    return {other().reserve(static_cast<size_t>(width) * static_cast<size_t>(height) * 4), width,
            height};
  }

  // The first `count` stages; with the last of them also the mirrors.
  bool resample(Bitmap& bitmap, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const Stage& stage = geometry_.stages[i];
      const bool last = i + 1 == geometry_.stages.size();
      const int64_t width = stage.window.width, height = stage.window.height;
      if (!fits(width, std::max(height, stage.box.height))) return false;
      const Surface to = surface(width, height);
      const bool mirror_x = last && geometry_.mirror_x, mirror_y = last && geometry_.mirror_y;
      run(stage, bitmap, s_.stage, [&](int64_t y, const uint8_t* row) {
        uint8_t* out = to.row(mirror_y ? height - 1 - y : y);
        if (!mirror_x) {
          std::memcpy(out, row, to.stride());
          return;
        }
        for (int64_t x = 0; x < width; ++x) std::memcpy(out + 4 * x, row + 4 * (width - 1 - x), 4);
      });
      bitmap = to.bitmap();
    }
    return true;
  }

  // Actions up to the next crop, resize or flip, on a bitmap that is this run's own.
  bool change(Bitmap& bitmap) {
    const std::vector<Action>& actions = sample_.drawing().actions;
    while (next_ < actions.size()) {
      const Action& action = actions[next_];
      if (const auto* border = std::get_if<Border>(&action)) {
        if (!add_border(*border, bitmap)) return false;
        ++next_;
      } else if (const auto* warp = std::get_if<Warp>(&action)) {
        const Surface from = own(bitmap), to = surface(bitmap.width, bitmap.height);
        warp_pixels(*warp, from, to);
        bitmap = to.bitmap();
        ++next_;
      } else if (!change_colors(bitmap)) {
        break;
      }
    }
    return true;
  }

  // The run's own pixels, to be written.
  Surface own(const Bitmap& bitmap) {
    return {s_.middle[turn_ ? 1 : 0].data(), bitmap.width, bitmap.height};
  }

  // False if the next action is no colour.
  bool change_colors(const Bitmap& bitmap) {
    const std::vector<Action>& actions = sample_.drawing().actions;
    const size_t first = next_;
    Colors colors(own(bitmap), s_.middle[turn_ ? 0 : 1]);
    for (; next_ < actions.size(); ++next_) {
      if (const auto* color = std::get_if<Color>(&actions[next_])) {
        colors.apply(*color);
      } else if (const auto* blur = std::get_if<Blur>(&actions[next_])) {
        colors.apply(*blur);
      } else {
        break;
      }
    }
    colors.flush();
    return next_ > first;
  }

  bool add_border(const Border& border, Bitmap& bitmap) {
    const int64_t width = bitmap.width + border.left + border.right;
    const int64_t height = bitmap.height + border.top + border.bottom;
    if (!fits(width, height)) return false;
    const Surface from = own(bitmap), to = surface(width, height);
    for (int64_t y = 0; y < height; ++y) {
      const uint8_t* row = from.row(inside(border.mode, y - border.top, from.height));
      uint8_t* out = to.row(y);
      for (int64_t x = 0; x < width; ++x) {
        std::memcpy(out + 4 * x, row + 4 * inside(border.mode, x - border.left, from.width), 4);
      }
    }
    bitmap = to.bitmap();
    return true;
  }

  const Pipeline::Impl& pipeline_;
  Sample& sample_;
  Scratch::Impl& s_;
  std::byte* out_;
  Geometry geometry_;
  size_t next_ = 0;
  bool turn_ = false;
  std::optional<Error> refused_;
};

Error wrong_place(const char* what, size_t have, size_t want) {
  return Error(ErrorKind::usage, "the place of " + std::string(what) + " has " +
                                     std::to_string(have) + " bytes, not " + std::to_string(want));
}

std::optional<Error> run_mask(const Pipeline::Impl& pipeline, const Mask& mask, Sample& sample,
                              Scratch::Impl& s) {
  const size_t bytes = size_t{pipeline.output.height} * pipeline.output.width * size_of(mask.type);
  if (mask.out.size() != bytes) return wrong_place("a mask", mask.out.size(), bytes);
  const auto values = decode_mask(mask, pipeline.max_pixels, s.mask);
  if (!values) return values.error();
  if (auto error = sample.enter(values.value().width, values.value().height)) return error;
  const auto moved = move_mask(values.value(), sample.drawing(), mask, pipeline.max_pixels, s.mask);
  if (!moved) return moved.error();
  return std::nullopt;
}

std::optional<Error> run_record(const Pipeline::Impl& pipeline, const Record& record,
                                const SampleKey& key, Scratch::Impl& s) {
  Sample sample(pipeline, key);
  for (const Picture& picture : record.images) {
    if (picture.out.size() != pipeline.output.bytes()) {
      return wrong_place("an image", picture.out.size(), pipeline.output.bytes());
    }
    if (auto error = ImageRun(pipeline, sample, s, picture.out)(picture)) return error;
  }
  for (const Mask& mask : record.masks) {
    if (auto error = run_mask(pipeline, mask, sample, s)) return error;
  }
  if (!sample.entered()) {
    return Error(ErrorKind::usage,
                 "a record without image and mask, which would tell the size of the canvas");
  }
  for (Boxes& boxes : record.boxes) {
    if (auto error = move_boxes(sample.drawing(), pipeline.sanitizes, boxes)) return error;
  }
  for (const Keypoints& keypoints : record.keypoints) {
    if (auto error = move_keypoints(sample.drawing(), keypoints)) return error;
  }
  return std::nullopt;
}

}  // namespace

Pipeline::Pipeline(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;
Pipeline::~Pipeline() = default;
const Output& Pipeline::output() const noexcept { return impl_->output; }
uint32_t Pipeline::draws() const { return draws_of(impl_->steps); }

Result<std::monostate> Pipeline::apply_record(const Record& record, const SampleKey& key,
                                              Scratch& scratch) const try {
  if (auto error = run_record(*impl_, record, key, scratch.impl())) return *error;
  return std::monostate{};
} catch (const std::bad_alloc&) {
  return no_memory_to_unpack();
}

Result<std::monostate> Pipeline::apply(std::span<const std::byte> encoded, const SampleKey& key,
                                       Scratch& scratch, std::span<std::byte> out) const {
  const Picture picture{encoded, out, std::nullopt};
  return apply_record({{&picture, 1}, {}, {}, {}}, key, scratch);
}

Result<std::vector<Description>> Pipeline::drawn(const SampleKey& key, int64_t width,
                                                 int64_t height) const {
  Sample sample(*impl_, key);
  if (auto error = sample.enter(width, height)) return *error;
  std::vector<Description> all;
  for (const Action& action : sample.drawing().actions) all.push_back(describe(action));
  return all;
}

Result<Decoded> decode_rgb(std::span<const std::byte> encoded, const Options& options,
                           Scratch& scratch) try {
  auto decoded = decode(
      encoded, options.max_pixels,
      [](int64_t width, int64_t height) {
        return Wanted{{0, 0, width, height}, 0};
      },
      scratch.impl().jpeg, scratch.impl().decoded);
  if (!decoded) return decoded.error();
  const Bitmap& bitmap = decoded.value();
  Decoded image{static_cast<uint32_t>(bitmap.height), static_cast<uint32_t>(bitmap.width), {}};
  image.rgb.resize(static_cast<size_t>(bitmap.width * bitmap.height) * 3);
  uint8_t* to = image.rgb.data();
  for (int64_t y = 0; y < bitmap.height; ++y) {
    const uint8_t* from = bitmap.pixels + static_cast<size_t>(y) * bitmap.stride;
    for (int64_t x = 0; x < bitmap.width; ++x, from += 4, to += 3) std::memcpy(to, from, 3);
  }
  return image;
} catch (const std::bad_alloc&) {
  return no_memory_to_unpack();
}

}  // namespace nostall::image
