// Compiles a list of steps, and applies it to one image at a time.
//
// apply() works out the geometry first, from the header's size and the sample's draws. Each stage
// needs a box of its input; the first stage's box, and how far it is scaled down, tell the decoder
// which region to decode and at which DCT scale. The last stage's rows go through flips, conversion
// and normalisation straight into the batch, one row at a time.
#include "image/pipeline.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "base/half.h"
#include "image/decode.h"
#include "image/geometry.h"
#include "image/resample.h"

namespace nostall::image {
namespace {

// A DCT scale is used while the box decoded has at least this many pixels for each one of the
// result: the filter then still averages more than what the scaled transform has merged.
constexpr int64_t kShrinkMargin = 2;

struct StageBuffers {
  explicit StageBuffers(HeldBytes* counted) : narrow(counted), row(counted), padded(counted) {}
  Filter x, y;
  Buffer narrow, row, padded;
  std::vector<const uint8_t*> rows;
};

// Calls sink(y, row) for each row of the stage's window: 4-byte pixels.
template <typename Sink>
void run(const Stage& stage, const Bitmap& in, StageBuffers& b, const Sink& sink) {
  const Box& window = stage.window;
  const int64_t x0 = std::max<int64_t>(0, window.x), y0 = std::max<int64_t>(0, window.y);
  const int64_t columns = std::min(stage.width, window.x + window.width) - x0;
  const int64_t rows = std::min(stage.height, window.y + window.height) - y0;
  uint8_t* padded = b.padded.reserve(static_cast<size_t>(window.width) * 4);
  std::memset(padded, 0, static_cast<size_t>(window.width) * 4);
  if (columns <= 0 || rows <= 0) {
    for (int64_t y = 0; y < window.height; ++y) sink(y, padded);
    return;
  }

  const double unit = static_cast<double>(int64_t{1} << in.shrink);
  const auto edge = [unit](int64_t at) { return static_cast<double>(at) / unit; };
  b.x.prepare(edge(stage.box.x), edge(stage.box.x + stage.box.width), stage.width, x0, columns,
              in.x, in.width);
  b.y.prepare(edge(stage.box.y), edge(stage.box.y + stage.box.height), stage.height, y0, rows, in.y,
              in.height);
  const Kernels& kernel = kernels();

  // The horizontal pass, on the rows that the vertical one reads.
  const size_t bytes = static_cast<size_t>(columns) * 4;
  const uint8_t* narrow = in.pixels;
  size_t stride = in.stride;
  const int64_t first = b.y.first.front(), last = b.y.first.back() + b.y.count.back() - 1;
  if (b.x.identity) {
    narrow += size_t{4} * static_cast<size_t>(b.x.first.front());
  } else {
    stride = (bytes + 31) / 32 * 32;
    uint8_t* out = b.narrow.reserve(stride * static_cast<size_t>(last - first + 1));
    for (int64_t y = first; y <= last; y += 2) {
      const int64_t next = std::min(y + 1, last);
      kernel.horizontal(b.x, in.pixels + static_cast<size_t>(y) * in.stride,
                        in.pixels + static_cast<size_t>(next) * in.stride,
                        out + static_cast<size_t>(y - first) * stride,
                        out + static_cast<size_t>(next - first) * stride);
    }
    narrow = out;
  }
  const auto at = [&](int64_t y) {
    return narrow + static_cast<size_t>(b.x.identity ? y : y - first) * stride;
  };

  uint8_t* row = b.row.reserve((bytes + 31) / 32 * 32);
  for (int64_t y = 0; y < window.height; ++y) {
    const int64_t i = y + window.y - y0;
    if (i < 0 || i >= rows) {
      std::memset(padded, 0, static_cast<size_t>(window.width) * 4);
      sink(y, padded);
      continue;
    }
    const auto index = static_cast<size_t>(i);
    const uint8_t* result = row;
    if (b.y.identity) {
      result = at(b.y.first[0] + i);
    } else {
      const int32_t taps = (b.y.count[index] + 1) / 2 * 2;
      b.rows.resize(static_cast<size_t>(taps));
      for (int32_t tap = 0; tap < taps; ++tap) {
        b.rows[static_cast<size_t>(tap)] =
            at(b.y.first[index] + std::min(tap, b.y.count[index] - 1));
      }
      kernel.vertical(b.rows.data(), &b.y.weights[index * static_cast<size_t>(b.y.taps)], taps, row,
                      bytes);
    }
    if (columns < window.width) {
      std::memcpy(padded + (x0 - window.x) * 4, result, bytes);
      result = padded;
    }
    sink(y, result);
  }
}

// The part of the stage's input that its window is made of.
Box support_of(const Stage& stage) {
  const auto axis = [](int64_t box, int64_t size, int64_t full, int64_t window, int64_t count) {
    const double scale = static_cast<double>(size) / static_cast<double>(full);
    const double support = std::max(1.0, scale) + 1;
    const auto low = static_cast<int64_t>(static_cast<double>(window) * scale - support);
    const auto high =
        static_cast<int64_t>(std::ceil(static_cast<double>(window + count) * scale + support));
    const int64_t begin = std::clamp<int64_t>(low, 0, size - 1);
    return std::pair{box + begin, std::clamp<int64_t>(high, begin + 1, size) - begin};
  };
  const auto [x, w] =
      axis(stage.box.x, stage.box.width, stage.width, stage.window.x, stage.window.width);
  const auto [y, h] =
      axis(stage.box.y, stage.box.height, stage.height, stage.window.y, stage.window.height);
  return {x, y, w, h};
}

unsigned shrink_of(const Stage& stage) {
  unsigned shrink = 0;
  while (shrink < 3 && (stage.box.width >> (shrink + 1)) >= kShrinkMargin * stage.width &&
         (stage.box.height >> (shrink + 1)) >= kShrinkMargin * stage.height) {
    ++shrink;
  }
  return shrink;
}

[[noreturn]] void usage(const std::string& what) { throw Error(ErrorKind::usage, what); }

void check_size(const char* step, uint32_t height, uint32_t width) {
  if (height == 0 || width == 0 || height > kMaxSide || width > kMaxSide) {
    usage(std::string(step) + " to " + std::to_string(height) + "x" + std::to_string(width) +
          ": sides must be between 1 and " + std::to_string(kMaxSide));
  }
}

void check_range(const char* what, const std::array<double, 2>& range) {
  if (!(range[0] > 0 && range[0] <= range[1] && std::isfinite(range[1]))) {
    usage(std::string("RandomResizedCrop ") + what + " (" + std::to_string(range[0]) + ", " +
          std::to_string(range[1]) + ") must be positive and ascending");
  }
}

// Checks steps one by one and folds ToTensor and Normalize into one scale and offset a channel.
class Compiler {
 public:
  uint32_t height = 0, width = 0;  // 0 while the size depends on the image
  bool tensor = false, normalized = false;
  std::array<double, 3> scale{1, 1, 1}, offset{};

  void operator()(const Decode&) {
    if (!first_) usage("Decode must be the first step");
  }
  void operator()(const Resize& step) {
    geometry("Resize");
    check_size("Resize", step.height, step.width == 0 ? step.height : step.width);
    if (step.width == 0 && height != 0 && height == width) {
      height = width = step.height;
    } else {
      height = step.width == 0 ? 0 : step.height;
      width = step.width;
    }
  }
  void operator()(const CenterCrop& step) { fix("CenterCrop", step.height, step.width); }
  void operator()(const RandomResizedCrop& step) {
    fix("RandomResizedCrop", step.height, step.width);
    check_range("scale", step.scale);
    check_range("ratio", step.ratio);
  }
  void operator()(const RandomHorizontalFlip& step) { flip("RandomHorizontalFlip", step.p); }
  void operator()(const RandomVerticalFlip& step) { flip("RandomVerticalFlip", step.p); }
  void operator()(const ToTensor&) {
    if (tensor) usage("ToTensor appears twice: keep the first");
    tensor = true;
    for (double& factor : scale) factor = 1.0 / 255;
  }
  void operator()(const Normalize& step) {
    if (!tensor) usage("Normalize needs ToTensor before it");
    normalized = true;
    for (size_t c = 0; c < 3; ++c) {
      const double std = step.std[c], mean = step.mean[c];
      if (!(std > 0 && std::isfinite(std) && std::isfinite(mean))) {
        usage("Normalize with mean " + std::to_string(mean) + ", std " + std::to_string(std) +
              ": both must be finite, std above zero");
      }
      scale[c] /= std;
      offset[c] = (offset[c] - mean) / std;
    }
  }
  void next() { first_ = false; }

 private:
  void geometry(const char* step) {
    if (tensor) usage(std::string(step) + " must come before ToTensor");
  }
  void fix(const char* step, uint32_t h, uint32_t w) {
    geometry(step);
    check_size(step, h, w);
    height = h;
    width = w;
  }
  static void flip(const char* step, double p) {
    if (!(p >= 0 && p <= 1)) {
      usage(std::string(step) + " with p = " + std::to_string(p) + ": must be between 0 and 1");
    }
  }
  bool first_ = true;
};

size_t size_of(Type type) { return type == Type::float32 ? 4 : type == Type::float16 ? 2 : 1; }

}  // namespace

size_t Output::bytes() const noexcept { return size_t{height} * width * 3 * size_of(type); }

struct Scratch::Impl {
  explicit Impl(HeldBytes* counted)
      : decoded(counted), middle{Buffer(counted), Buffer(counted)}, line(counted), stage(counted) {}
  Buffer decoded, middle[2], line;
  StageBuffers stage;
  int small_images = 0;  // since the last large one
  std::array<Buffer*, 7> buffers() noexcept {
    return {&decoded, &middle[0], &middle[1], &line, &stage.narrow, &stage.row, &stage.padded};
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

struct Pipeline::Impl {
  std::vector<Step> steps;
  Output output;
  uint64_t max_pixels = 0;
  std::optional<Pixels> pixels;
  std::array<float, 3> scale{}, offset{};

  // Writes row `y` of the image, flips included.
  void store(int64_t y, const uint8_t* row, const Geometry& geometry, Buffer& line,
             std::byte* out) const {
    const int64_t width = output.width, height = output.height;
    const int64_t to = geometry.mirror_y ? height - 1 - y : y;
    const bool mirror = geometry.mirror_x, chw = output.layout == Layout::chw;
    const auto place = [&](int c, int64_t x) {  // of one value, in values
      return chw ? (c * height + to) * width + x : (to * width + x) * 3 + c;
    };
    if (output.type == Type::uint8) {
      auto* bytes = reinterpret_cast<uint8_t*>(out);
      for (int64_t x = 0; x < width; ++x) {
        const uint8_t* pixel = row + 4 * (mirror ? width - 1 - x : x);
        for (int c = 0; c < 3; ++c) bytes[place(c, x)] = pixel[c];
      }
      return;
    }
    float* planes[3];
    if (output.type == Type::float32 && chw) {
      for (int c = 0; c < 3; ++c) planes[c] = reinterpret_cast<float*>(out) + place(c, 0);
      kernels().planes_f32(row, width, mirror, scale.data(), offset.data(), planes);
      return;
    }
    auto* values = reinterpret_cast<float*>(line.reserve(static_cast<size_t>(width) * 12));
    for (int c = 0; c < 3; ++c) planes[c] = values + c * width;
    kernels().planes_f32(row, width, mirror, scale.data(), offset.data(), planes);
    for (int c = 0; c < 3; ++c) {
      for (int64_t x = 0; x < width; ++x) {
        const float value = planes[c][x];
        if (output.type == Type::float32) {
          std::memcpy(out + place(c, x) * 4, &value, 4);
        } else {
          const uint16_t half = half_of(value);
          std::memcpy(out + place(c, x) * 2, &half, 2);
        }
      }
    }
  }
};

Pipeline::Pipeline(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;
Pipeline::~Pipeline() = default;
const Output& Pipeline::output() const noexcept { return impl_->output; }

Pipeline Pipeline::compile(std::span<const Step> steps, const Options& options) {
  Compiler compiler;
  for (const Step& step : steps) {
    std::visit(compiler, step);
    compiler.next();
  }
  if (compiler.height == 0) {
    usage(
        "the transforms give images of different sizes, which cannot be batched: add a Resize "
        "to (height, width), a CenterCrop or a RandomResizedCrop");
  }
  auto impl = std::make_unique<Impl>();
  impl->steps.assign(steps.begin(), steps.end());
  impl->max_pixels = options.max_pixels;
  impl->pixels = options.pixels;
  if (options.pixels) check_pixels(*options.pixels, options.max_pixels);
  impl->output = {compiler.height, compiler.width,
                  options.type.value_or(compiler.tensor ? Type::float32 : Type::uint8),
                  options.layout.value_or(compiler.tensor ? Layout::chw : Layout::hwc)};
  if (compiler.tensor && impl->output.type == Type::uint8) {
    usage(
        "ToTensor gives floating-point values, which uint8 cannot hold: drop ToTensor and "
        "Normalize or ask for float16 or float32");
  }
  for (size_t c = 0; c < 3; ++c) {
    impl->scale[c] = static_cast<float>(compiler.scale[c]);
    impl->offset[c] = static_cast<float>(compiler.offset[c]);
  }
  return Pipeline(std::move(impl));
}

Result<std::monostate> Pipeline::apply(std::span<const std::byte> encoded, const SampleKey& key,
                                       Scratch& scratch, std::span<std::byte> out) const try {
  if (out.size() != impl_->output.bytes()) {
    return Error(ErrorKind::usage, "the output has " + std::to_string(out.size()) + " bytes, not " +
                                       std::to_string(impl_->output.bytes()));
  }
  Scratch::Impl& s = scratch.impl();
  Geometry geometry;
  const auto compose_for = [&](int64_t width, int64_t height) {
    SampleRandom random(key.seed, key.epoch, key.sample);
    geometry = compose(impl_->steps, width, height, random);
    const Stage& first = geometry.stages.front();
    return Wanted{support_of(first), shrink_of(first)};
  };
  if (impl_->pixels) compose_for(impl_->pixels->width, impl_->pixels->height);
  auto decoded = impl_->pixels ? unpack_pixels(encoded, *impl_->pixels, s.decoded)
                               : decode(encoded, impl_->max_pixels, compose_for, s.decoded);
  if (!decoded) return decoded.error();
  Bitmap bitmap = decoded.value();
  for (size_t i = 0; i + 1 < geometry.stages.size(); ++i) {
    const Stage& stage = geometry.stages[i];
    const int64_t width = stage.window.width, height = stage.window.height;
    if (static_cast<double>(width) * static_cast<double>(std::max(height, stage.box.height)) >
        static_cast<double>(impl_->max_pixels)) {
      return Error(ErrorKind::corruption, "an image of so odd a shape that resizing it needs " +
                                              std::to_string(width) + "x" + std::to_string(height) +
                                              " pixels: raise max_pixels if it is genuine");
    }
    const size_t stride = static_cast<size_t>(width) * 4;
    uint8_t* pixels = s.middle[i % 2].reserve(stride * static_cast<size_t>(height));
    run(stage, bitmap, s.stage, [&](int64_t y, const uint8_t* row) {
      std::memcpy(pixels + static_cast<size_t>(y) * stride, row, stride);
    });
    bitmap = {pixels, stride, 0, 0, width, height, 0};
  }
  run(geometry.stages.back(), bitmap, s.stage,
      [&](int64_t y, const uint8_t* row) { impl_->store(y, row, geometry, s.line, out.data()); });
  return std::monostate{};
} catch (const std::bad_alloc&) {
  return Error(ErrorKind::corruption, "an image that needs more memory than there is");
}

Result<Decoded> decode_rgb(std::span<const std::byte> encoded, const Options& options) try {
  Buffer buffer;
  auto decoded = decode(
      encoded, options.max_pixels,
      [](int64_t width, int64_t height) {
        return Wanted{{0, 0, width, height}, 0};
      },
      buffer);
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
  return Error(ErrorKind::corruption, "an image that needs more memory than there is");
}

}  // namespace nostall::image
