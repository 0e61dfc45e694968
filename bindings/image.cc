// nostall._native: Pipeline, compile_pipeline, decode_rgb, Mixing.
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/random.h"
#include "image/mix.h"
#include "image/pipeline.h"
#include "mixture.h"
#include "module.h"
#include "scratch.h"
#include "text.h"

namespace nb = nanobind;

namespace {

namespace image = nostall::image;

[[noreturn]] void usage(const std::string& what) {
  throw nostall::Error(nostall::ErrorKind::usage, what);
}

template <typename T>
T parameter(const nb::dict& parameters, const char* name) {
  if (!parameters.contains(name)) usage(std::string("a step lacks its parameter ") + name);
  return nb::cast<T>(parameters[name]);
}

constexpr const char* kTypes[] = {"uint8", "float16", "float32"};
constexpr const char* kLayouts[] = {"chw", "hwc"};
constexpr const char* kInterpolations[] = {"bilinear", "bicubic", "nearest", "nearest_exact"};
constexpr const char* kPadModes[] = {"constant", "edge", "reflect", "symmetric"};
constexpr const char* kPolicies[] = {"imagenet", "cifar10", "svhn"};
constexpr const char* kMaskTypes[] = {"uint8", "uint16", "int16", "int32", "int64", "float32"};
constexpr const char* kBoxFormats[] = {"xyxy", "xywh", "cxcywh"};

template <typename T, size_t N>
T choice(const char* what, const char* const (&names)[N], const std::string& name) {
  std::string known;
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<T>(i);
    known += (i ? ", " : "") + std::string(names[i]);
  }
  usage(std::string(what) + " " + name + " is not one of " + known);
}

template <typename T, size_t N>
std::optional<T> choice(const char* what, const char* const (&names)[N],
                        const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  return choice<T>(what, names, *name);
}

using Pair = std::array<double, 2>;

// A step's parameters, each by the name that it has in nostall.transforms.
class Parameters {
 public:
  explicit Parameters(const nb::dict& values) : values_(values) {}
  template <typename T>
  T get(const char* name) const {
    return parameter<T>(values_, name);
  }
  double p() const { return get<double>("p"); }
  uint32_t height() const { return get<uint32_t>("height"); }
  uint32_t width() const { return get<uint32_t>("width"); }
  image::Interpolation interpolation() const {
    return choice<image::Interpolation>("interpolation", kInterpolations,
                                        get<std::string>("interpolation"));
  }
  image::PadMode pad_mode() const {
    return choice<image::PadMode>("padding_mode", kPadModes, get<std::string>("padding_mode"));
  }
  image::Fill fill() const {
    return {get<std::array<uint8_t, 3>>("fill"), get<uint16_t>("mask_fill")};
  }

 private:
  const nb::dict& values_;
};

using Maker = image::Step (*)(const Parameters&);

// In the order of image/steps.h.
const std::map<std::string, Maker, std::less<>>& makers() {
  using P = const Parameters&;
  using image::Step;
  static const std::map<std::string, Maker, std::less<>> all{
      {"Decode", [](P) -> Step { return image::Decode{}; }},
      {"Drawn", [](P p) -> Step { return image::Drawn{p.get<uint32_t>("draws")}; }},
      {"Resize",
       [](P p) -> Step {
         return image::Resize{p.height(), p.width(), p.interpolation(), p.get<bool>("antialias")};
       }},
      {"CenterCrop",
       [](P p) -> Step {
         return image::CenterCrop{p.height(), p.width()};
       }},
      {"RandomResizedCrop",
       [](P p) -> Step {
         return image::RandomResizedCrop{p.height(),           p.width(),
                                         p.get<Pair>("scale"), p.get<Pair>("ratio"),
                                         p.interpolation(),    p.get<bool>("antialias")};
       }},
      {"RandomHorizontalFlip", [](P p) -> Step { return image::RandomHorizontalFlip{p.p()}; }},
      {"RandomVerticalFlip", [](P p) -> Step { return image::RandomVerticalFlip{p.p()}; }},
      {"Pad",
       [](P p) -> Step {
         return image::Pad{p.get<std::array<uint32_t, 4>>("padding"), p.pad_mode(), p.fill()};
       }},
      {"RandomCrop",
       [](P p) -> Step {
         return image::RandomCrop{p.height(),
                                  p.width(),
                                  p.get<std::array<uint32_t, 4>>("padding"),
                                  p.get<bool>("pad_if_needed"),
                                  p.pad_mode(),
                                  p.fill()};
       }},
      {"RandomRotation",
       [](P p) -> Step {
         return image::RandomRotation{p.get<Pair>("degrees"), p.interpolation(),
                                      p.get<std::optional<Pair>>("center"), p.fill()};
       }},
      {"RandomAffine",
       [](P p) -> Step {
         return image::RandomAffine{p.get<Pair>("degrees"),
                                    p.get<Pair>("translate"),
                                    p.get<Pair>("scale"),
                                    p.get<std::array<double, 4>>("shear"),
                                    p.interpolation(),
                                    p.get<std::optional<Pair>>("center"),
                                    p.fill()};
       }},
      {"RandomPerspective",
       [](P p) -> Step {
         return image::RandomPerspective{p.get<double>("distortion_scale"), p.p(),
                                         p.interpolation(), p.fill()};
       }},
  };
  return all;
}

const std::map<std::string, Maker, std::less<>>& color_makers() {
  using P = const Parameters&;
  using image::Step;
  static const std::map<std::string, Maker, std::less<>> all{
      {"ColorJitter",
       [](P p) -> Step {
         const auto range = [&p](const char* name) { return p.get<std::optional<Pair>>(name); };
         return image::ColorJitter{range("brightness"), range("contrast"), range("saturation"),
                                   range("hue")};
       }},
      {"Grayscale", [](P) -> Step { return image::Grayscale{}; }},
      {"RandomGrayscale", [](P p) -> Step { return image::RandomGrayscale{p.p()}; }},
      {"GaussianBlur",
       [](P p) -> Step {
         return image::GaussianBlur{p.get<std::array<uint32_t, 2>>("kernel"), p.get<Pair>("sigma")};
       }},
      {"RandomSolarize",
       [](P p) -> Step {
         return image::RandomSolarize{p.get<double>("threshold"), p.p()};
       }},
      {"RandomPosterize",
       [](P p) -> Step {
         return image::RandomPosterize{p.get<uint32_t>("bits"), p.p()};
       }},
      {"RandomInvert", [](P p) -> Step { return image::RandomInvert{p.p()}; }},
      {"RandomAutocontrast", [](P p) -> Step { return image::RandomAutocontrast{p.p()}; }},
      {"RandomEqualize", [](P p) -> Step { return image::RandomEqualize{p.p()}; }},
      {"RandomAdjustSharpness",
       [](P p) -> Step {
         return image::RandomAdjustSharpness{p.get<double>("factor"), p.p()};
       }},
  };
  return all;
}

const std::map<std::string, Maker, std::less<>>& other_makers() {
  using P = const Parameters&;
  using image::Step;
  static const std::map<std::string, Maker, std::less<>> all{
      {"RandAugment",
       [](P p) -> Step {
         return image::RandAugment{p.get<uint32_t>("num_ops"), p.get<uint32_t>("magnitude"),
                                   p.get<uint32_t>("num_magnitude_bins"), p.interpolation(),
                                   p.fill()};
       }},
      {"TrivialAugmentWide",
       [](P p) -> Step {
         return image::TrivialAugmentWide{p.get<uint32_t>("num_magnitude_bins"), p.interpolation(),
                                          p.fill()};
       }},
      {"AutoAugment",
       [](P p) -> Step {
         const auto policy = p.get<std::string>("policy");
         return image::AutoAugment{choice<image::Policy>("policy", kPolicies, policy),
                                   p.interpolation(), p.fill()};
       }},
      {"ClampBoundingBoxes", [](P) -> Step { return image::ClampBoundingBoxes{}; }},
      {"SanitizeBoundingBoxes",
       [](P p) -> Step {
         return image::SanitizeBoundingBoxes{p.get<double>("min_size"), p.get<double>("min_area")};
       }},
      {"ToTensor", [](P) -> Step { return image::ToTensor{}; }},
      {"Normalize",
       [](P p) -> Step {
         return image::Normalize{p.get<std::array<float, 3>>("mean"),
                                 p.get<std::array<float, 3>>("std")};
       }},
      {"RandomErasing",
       [](P p) -> Step {
         return image::RandomErasing{p.p(), p.get<Pair>("scale"), p.get<Pair>("ratio"),
                                     p.get<std::array<float, 3>>("value"), p.get<bool>("noise")};
       }},
  };
  return all;
}

image::Step make_step(const std::string& name, const nb::dict& parameters) {
  for (const auto* table : {&makers(), &color_makers(), &other_makers()}) {
    const auto found = table->find(name);
    if (found != table->end()) return found->second(Parameters(parameters));
  }
  usage("no image step is named " + name);
}

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The bytes of a bytes object or of anything that is an array of uint8; `keep` holds them.
std::span<const std::byte> view(nb::handle source, Bytes& keep) {
  if (PyBytes_Check(source.ptr())) {
    return {reinterpret_cast<const std::byte*>(PyBytes_AsString(source.ptr())),
            static_cast<size_t>(PyBytes_Size(source.ptr()))};
  }
  if (!nb::try_cast<Bytes>(source, keep)) usage("encoded images are bytes or arrays of uint8");
  return {reinterpret_cast<const std::byte*>(keep.data()), keep.size()};
}

// An array of `dtype` that owns `data`.
nb::object to_numpy(std::unique_ptr<std::byte[]> data, std::initializer_list<size_t> shape,
                    nb::dlpack::dtype dtype) {
  std::byte* bytes = data.get();
  const nb::capsule owner(bytes, [](void* p) noexcept {
    const std::unique_ptr<std::byte[]> freed(static_cast<std::byte*>(p));
  });
  data.release();
  return nb::cast(nb::ndarray<nb::numpy>(bytes, shape, owner, {}, dtype));
}

nb::dlpack::dtype numpy_type(image::Type type) {
  if (type == image::Type::uint8) return nb::dtype<uint8_t>();
  const auto bits = static_cast<uint8_t>(type == image::Type::float16 ? 16 : 32);
  return {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), bits, 1};
}

nb::object apply(const image::Pipeline& pipeline, nb::handle encoded, uint64_t seed, uint32_t epoch,
                 uint64_t sample, uint32_t occurrence) {
  Bytes keep;
  const std::span<const std::byte> bytes = view(encoded, keep);
  const image::Output& output = pipeline.output();
  auto data = std::make_unique_for_overwrite<std::byte[]>(output.bytes());
  const nostall::bindings::Lent<image::Scratch> scratch;
  {
    const nb::gil_scoped_release release;
    const image::SampleKey key{nostall::seed_of_occurrence(seed, occurrence), epoch, sample};
    auto result = pipeline.apply(bytes, key, scratch.get(), {data.get(), output.bytes()});
    std::move(result).take();
  }
  const size_t h = output.height, w = output.width;
  const nb::dlpack::dtype type = numpy_type(output.type);
  if (output.layout == image::Layout::chw) return to_numpy(std::move(data), {3, h, w}, type);
  return to_numpy(std::move(data), {h, w, 3}, type);
}

nb::dlpack::dtype numpy_type(image::MaskType type) {
  using Code = nb::dlpack::dtype_code;
  const Code code = type == image::MaskType::float32  ? Code::Float
                    : type <= image::MaskType::uint16 ? Code::UInt
                                                      : Code::Int;
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * image::size_of(type)), 1};
}

using MaskPixelRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::span<const float> numbers(const Rows& rows) { return {rows.data(), rows.size()}; }

// What apply_record() reads and writes, held until arrays are made of it.
class Parts {
 public:
  Parts(const image::Pipeline& pipeline, const nb::dict& parts) : output_(pipeline.output()) {
    const auto count = [&parts](const char* name) {
      return parts.contains(name) ? nb::len(nb::list(parts[name])) : size_t{0};
    };
    keep_.resize(count("images") + count("masks"));
    size_t kept = 0;
    if (count("images") != 0) {
      for (nb::handle encoded : nb::list(parts["images"])) {
        images_.push_back({view(encoded, keep_[kept++]), place(output_.bytes()), std::nullopt});
      }
    }
    if (count("masks") != 0) {
      for (nb::handle item : nb::list(parts["masks"])) {
        const auto [encoded, type] = nb::cast<std::pair<nb::object, std::string>>(item);
        const auto mask_type = choice<image::MaskType>("mask dtype", kMaskTypes, type);
        const size_t bytes = size_t{output_.height} * output_.width * image::size_of(mask_type);
        std::optional<image::MaskPixels> pixels;
        MaskPixelRows rows;
        if (nb::try_cast(encoded, rows)) {
          pixels = {static_cast<uint32_t>(rows.shape(0)), static_cast<uint32_t>(rows.shape(1)),
                    rows.dtype().bits / 8u};
          if (rows.dtype().code != static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) ||
              pixels->bytes > 2) {
            usage("a mask that is an array is uint8 or uint16");
          }
          mask_rows_.push_back(rows);
          const auto* begin = static_cast<const std::byte*>(rows.data());
          masks_.push_back({{begin, rows.nbytes()}, mask_type, place(bytes), pixels});
          continue;
        }
        masks_.push_back({view(encoded, keep_[kept++]), mask_type, place(bytes), pixels});
      }
    }
    if (count("boxes") != 0) add_boxes(nb::list(parts["boxes"]));
    if (count("keypoints") != 0) add_keypoints(nb::list(parts["keypoints"]));
  }

  image::Record record() { return {images_, masks_, boxes_, keypoints_}; }

  nb::dict arrays() {
    nb::list images, masks, boxes, keypoints;
    size_t next = 0;
    const size_t h = output_.height, w = output_.width;
    const bool chw = output_.layout == image::Layout::chw;
    for (size_t i = 0; i < images_.size(); ++i, ++next) {
      images.append(chw ? to_numpy(std::move(places_[next]), {3, h, w}, numpy_type(output_.type))
                        : to_numpy(std::move(places_[next]), {h, w, 3}, numpy_type(output_.type)));
    }
    for (const image::Mask& mask : masks_) {
      masks.append(to_numpy(std::move(places_[next++]), {h, w}, numpy_type(mask.type)));
    }
    for (const image::Boxes& each : boxes_) {
      nb::object rows = to_numpy(std::move(places_[next++]), {each.count, 4}, nb::dtype<float>());
      nb::object kept = to_numpy(std::move(places_[next++]), {each.count}, nb::dtype<uint32_t>());
      boxes.append(nb::make_tuple(std::move(rows), std::move(kept)));
    }
    for (const image::Keypoints& each : keypoints_) {
      keypoints.append(to_numpy(std::move(places_[next++]),
                                {each.rows.size() / each.columns, each.columns},
                                nb::dtype<float>()));
    }
    nb::dict all;
    all["images"] = images;
    all["masks"] = masks;
    all["boxes"] = boxes;
    all["keypoints"] = keypoints;
    return all;
  }

 private:
  std::span<std::byte> place(size_t bytes) {
    places_.push_back(std::make_unique<std::byte[]>(bytes));
    return {places_.back().get(), bytes};
  }
  template <typename T>
  std::span<T> values(size_t count) {
    return {reinterpret_cast<T*>(place(count * sizeof(T)).data()), count};
  }
  void add_boxes(const nb::list& items) {
    for (nb::handle item : items) {
      const auto [rows, format, normalised] = nb::cast<std::tuple<Rows, std::string, bool>>(item);
      rows_.push_back(rows);
      image::Boxes boxes;
      boxes.rows = numbers(rows);
      boxes.format = choice<image::BoxFormat>("box format", kBoxFormats, format);
      boxes.normalised = normalised;
      boxes.out = values<float>(rows.size());
      boxes.kept = values<uint32_t>(rows.shape(0));
      boxes_.push_back(boxes);
    }
  }
  void add_keypoints(const nb::list& items) {
    for (nb::handle item : items) {
      const auto [rows, normalised] = nb::cast<std::pair<Rows, bool>>(item);
      rows_.push_back(rows);
      image::Keypoints points;
      points.rows = numbers(rows);
      points.columns = static_cast<uint32_t>(rows.shape(1));
      points.normalised = normalised;
      points.out = values<float>(rows.size());
      keypoints_.push_back(points);
    }
  }

  image::Output output_;
  std::vector<Bytes> keep_;
  std::vector<Rows> rows_;
  std::vector<MaskPixelRows> mask_rows_;
  std::vector<std::unique_ptr<std::byte[]>> places_;  // in the order of the arrays
  std::vector<image::Picture> images_;
  std::vector<image::Mask> masks_;
  std::vector<image::Boxes> boxes_;
  std::vector<image::Keypoints> keypoints_;
};

nb::dict apply_record(const image::Pipeline& pipeline, const nb::dict& parts, uint64_t seed,
                      uint32_t epoch, uint64_t sample, uint32_t occurrence) {
  Parts held(pipeline, parts);
  const nostall::bindings::Lent<image::Scratch> scratch;
  {
    const nb::gil_scoped_release release;
    const image::SampleKey key{nostall::seed_of_occurrence(seed, occurrence), epoch, sample};
    auto result = pipeline.apply_record(held.record(), key, scratch.get());
    std::move(result).take();
  }
  return held.arrays();
}

nb::list drawn(const image::Pipeline& pipeline, int64_t height, int64_t width, uint64_t seed,
               uint32_t epoch, uint64_t sample) {
  nb::list all;
  for (const auto& action : pipeline.drawn({seed, epoch, sample}, width, height).take()) {
    all.append(nb::make_tuple(action.name, action.values));
  }
  return all;
}

nb::object decode_rgb(nb::handle encoded, uint64_t max_pixels) {
  Bytes keep;
  const std::span<const std::byte> bytes = view(encoded, keep);
  std::unique_ptr<std::byte[]> data;
  size_t h = 0, w = 0;
  const nostall::bindings::Lent<image::Scratch> scratch;
  {
    const nb::gil_scoped_release release;
    image::Options options;
    options.max_pixels = max_pixels;
    const image::Decoded decoded = image::decode_rgb(bytes, options, scratch.get()).take();
    h = decoded.height;
    w = decoded.width;
    data = std::make_unique_for_overwrite<std::byte[]>(decoded.rgb.size());
    std::copy_n(reinterpret_cast<const std::byte*>(decoded.rgb.data()), decoded.rgb.size(),
                data.get());
  }
  return to_numpy(std::move(data), {h, w, 3}, nb::dtype<uint8_t>());
}

image::Pipeline compile(const std::vector<std::pair<std::string, nb::dict>>& steps,
                        const std::optional<std::string>& dtype,
                        const std::optional<std::string>& layout, uint64_t max_pixels,
                        const std::optional<nb::dict>& pixels) {
  std::vector<image::Step> native;
  for (const auto& [name, parameters] : steps) native.push_back(make_step(name, parameters));
  image::Options options;
  options.type = choice<image::Type>("dtype", kTypes, dtype);
  options.layout = choice<image::Layout>("layout", kLayouts, layout);
  options.max_pixels = max_pixels;
  if (pixels) {
    options.pixels = {parameter<uint32_t>(*pixels, "height"), parameter<uint32_t>(*pixels, "width"),
                      parameter<uint32_t>(*pixels, "channels"),
                      parameter<bool>(*pixels, "channels_first"), parameter<bool>(*pixels, "bgr")};
  }
  return image::Pipeline::compile(native, options);
}

constexpr const char* kMixers[] = {"mixup", "cutmix"};

image::Mixing make_mixing(const std::vector<std::tuple<std::string, double, double>>& mixers,
                          double p, uint32_t classes, uint32_t shift) {
  image::Mixing mixing{{}, p, classes, shift};
  for (const auto& [kind, alpha, weight] : mixers) {
    mixing.mixers.push_back({choice<image::Mixer::Kind>("mixer", kMixers, kind), alpha, weight});
  }
  image::validate(mixing);
  return mixing;
}

using Images = nb::ndarray<nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Labels = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Mixes the images of a batch that was made elsewhere. Gives lam and the targets.
nb::tuple mix(const image::Mixing& mixing, const Images& images, const Labels& labels,
              uint64_t seed, uint32_t epoch, uint64_t batch) {
  const auto same = [&](image::Type type) { return images.dtype() == numpy_type(type); };
  image::Output output;
  const bool planes = images.shape(1) == 3;
  output.layout = planes ? image::Layout::chw : image::Layout::hwc;
  output.height = static_cast<uint32_t>(images.shape(planes ? 2 : 1));
  output.width = static_cast<uint32_t>(images.shape(planes ? 3 : 2));
  output.type = same(image::Type::float32)   ? image::Type::float32
                : same(image::Type::float16) ? image::Type::float16
                                             : image::Type::uint8;
  if (!same(output.type) || (!planes && images.shape(3) != 3)) {
    usage(
        "images that are mixed are uint8, float16 or float32, (n, 3, height, width) or (n, "
        "height, width, 3)");
  }
  const size_t n = images.shape(0);
  if (labels.size() != n) usage("there must be as many labels as images");
  const std::span<const int64_t> classes(labels.data(), n);
  for (const int64_t label : classes) {
    if (mixing.classes > 0 && (label < 0 || label >= mixing.classes)) {
      usage("the label " + std::to_string(label) +
            " is not below num_classes=" + std::to_string(mixing.classes));
    }
  }
  auto targets = std::make_unique<std::byte[]>(n * mixing.classes * sizeof(float));
  image::Mixture mixture;
  {
    const nb::gil_scoped_release release;
    mixture = image::draw_mixture(mixing, output.width, output.height, seed, epoch, batch);
    image::mix_images(mixture, mixing.shift, output, static_cast<std::byte*>(images.data()), n);
    if (mixing.classes > 0) {
      image::mix_labels(mixture, mixing.shift, classes, mixing.classes,
                        reinterpret_cast<float*>(targets.get()));
    }
  }
  return nb::make_tuple(
      mixture.lam, to_numpy(std::move(targets), {n, size_t{mixing.classes}}, nb::dtype<float>()));
}

void bind_mixing(nb::module_& m) {
  nb::class_<image::Mixing>(m, "Mixing", "MixUp and CutMix of whole batches (native/image/mix.h).")
      .def_ro("classes", &image::Mixing::classes)
      .def_ro("shift", &image::Mixing::shift)
      .def(
          "drawn",
          [](const image::Mixing& mixing, int64_t height, int64_t width, uint64_t seed,
             uint32_t epoch, uint64_t batch) {
            return nostall::bindings::tuple_of(
                image::draw_mixture(mixing, width, height, seed, epoch, batch));
          },
          nb::arg("height"), nb::arg("width"), nb::kw_only(), nb::arg("seed") = 0,
          nb::arg("epoch") = 0, nb::arg("batch") = 0,
          "What a global batch gets: none, mixup or cutmix; lam; the box (x, y, width, height).")
      .def("apply", &mix, nb::arg("images"), nb::arg("labels"), nb::kw_only(), nb::arg("seed") = 0,
           nb::arg("epoch") = 0, nb::arg("batch") = 0,
           "Mixes the images of a local batch in place. Gives lam, and the targets (n, classes).");
  m.def("compile_mixing", &make_mixing, nb::arg("mixers"), nb::kw_only(), nb::arg("p"),
        nb::arg("classes"), nb::arg("shift"),
        "Of (\"mixup\" or \"cutmix\", alpha, weight), of which each batch gets one.");
}

}  // namespace

void bind_image(nb::module_& m) {
  bind_mixing(m);
  const uint64_t max_pixels = image::Options{}.max_pixels;
  nb::class_<image::Pipeline>(m, "Pipeline", "Compiled transforms of encoded images.")
      .def_prop_ro("height", [](const image::Pipeline& p) { return p.output().height; })
      .def_prop_ro("width", [](const image::Pipeline& p) { return p.output().width; })
      .def_prop_ro(
          "dtype",
          [](const image::Pipeline& p) { return kTypes[static_cast<size_t>(p.output().type)]; })
      .def_prop_ro(
          "layout",
          [](const image::Pipeline& p) { return kLayouts[static_cast<size_t>(p.output().layout)]; })
      .def_prop_ro("draws", &image::Pipeline::draws, "How many of a sample's draws the steps take.")
      .def("apply", &apply, nb::arg("encoded"), nb::kw_only(), nb::arg("seed") = 0,
           nb::arg("epoch") = 0, nb::arg("sample") = 0, nb::arg("occurrence") = 0,
           "Decodes and transforms one image; random draws depend on the four numbers alone, of "
           "which "
           "`occurrence` counts how often the epoch had the sample before.")
      .def("apply_record", &apply_record, nb::arg("parts"), nb::kw_only(), nb::arg("seed") = 0,
           nb::arg("epoch") = 0, nb::arg("sample") = 0, nb::arg("occurrence") = 0,
           "Transforms a sample of several parts. `parts` may have: images, a list of encoded "
           "images; masks, of (encoded PNG or an array of uint8 or uint16, dtype); boxes, of "
           "(float32 array (n, 4), format, "
           "normalised); keypoints, of (float32 array (n, 2 or 3), normalised). Gives the same "
           "names; boxes as (boxes, rows of the input that they were).")
      .def("drawn", &drawn, nb::arg("height"), nb::arg("width"), nb::kw_only(), nb::arg("seed") = 0,
           nb::arg("epoch") = 0, nb::arg("sample") = 0,
           "What the steps are for one sample of height x width pixels: (name, numbers) of each "
           "action.");
  m.def("compile_pipeline", &compile, nb::arg("steps"), nb::arg("dtype") = nb::none(),
        nb::arg("layout") = nb::none(), nb::arg("max_pixels") = max_pixels,
        nb::arg("pixels") = nb::none(),
        "Compiles [(name, parameters), ...] into a Pipeline; `pixels` is for samples that are not "
        "encoded: height, width, channels, channels_first, bgr.");
  m.def("decode_rgb", &decode_rgb, nb::arg("encoded"), nb::arg("max_pixels") = max_pixels,
        "Decodes a JPEG, PNG or WebP image to uint8 RGB, height x width x 3.");
}
