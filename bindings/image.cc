// nostall._native: Pipeline, compile_pipeline, decode_rgb.
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>

#include "base/random.h"
#include "image/pipeline.h"
#include "module.h"

namespace nb = nanobind;

namespace {

namespace image = nostall::image;

[[noreturn]] void usage(const std::string& what) {
  throw nostall::Error(nostall::ErrorKind::usage, what);
}

template <typename T>
T get(const nb::dict& parameters, const char* name) {
  if (!parameters.contains(name)) usage(std::string("a step lacks its parameter ") + name);
  return nb::cast<T>(parameters[name]);
}

image::Step make_step(const std::string& name, const nb::dict& p) {
  if (name == "Decode") return image::Decode{};
  if (name == "Resize") {
    return image::Resize{get<uint32_t>(p, "height"), get<uint32_t>(p, "width")};
  }
  if (name == "CenterCrop") {
    return image::CenterCrop{get<uint32_t>(p, "height"), get<uint32_t>(p, "width")};
  }
  if (name == "RandomResizedCrop") {
    return image::RandomResizedCrop{get<uint32_t>(p, "height"), get<uint32_t>(p, "width"),
                                    get<std::array<double, 2>>(p, "scale"),
                                    get<std::array<double, 2>>(p, "ratio")};
  }
  if (name == "RandomHorizontalFlip") return image::RandomHorizontalFlip{get<double>(p, "p")};
  if (name == "RandomVerticalFlip") return image::RandomVerticalFlip{get<double>(p, "p")};
  if (name == "ToTensor") return image::ToTensor{};
  if (name == "Normalize") {
    return image::Normalize{get<std::array<float, 3>>(p, "mean"),
                            get<std::array<float, 3>>(p, "std")};
  }
  usage("no image step is named " + name);
}

constexpr const char* kTypes[] = {"uint8", "float16", "float32"};
constexpr const char* kLayouts[] = {"chw", "hwc"};

template <typename T, size_t N>
std::optional<T> choice(const char* what, const char* const (&names)[N],
                        const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  std::string known;
  for (size_t i = 0; i < N; ++i) {
    if (*name == names[i]) return static_cast<T>(i);
    known += (i ? ", " : "") + std::string(names[i]);
  }
  usage(std::string(what) + " " + *name + " is not one of " + known);
}

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The bytes of a bytes object or of anything that is an array of uint8; `keep` holds them.
std::span<const std::byte> view(nb::handle source, Bytes& keep) {
  if (PyBytes_Check(source.ptr())) {
    return {reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(source.ptr())),
            static_cast<size_t>(PyBytes_GET_SIZE(source.ptr()))};
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

// Bytes that a thread keeps from image to image.
constexpr size_t kKeptScratch = size_t{16} << 20;

nb::object apply(const image::Pipeline& pipeline, nb::handle encoded, uint64_t seed, uint32_t epoch,
                 uint64_t sample, uint32_t occurrence) {
  Bytes keep;
  const std::span<const std::byte> bytes = view(encoded, keep);
  const image::Output& output = pipeline.output();
  auto data = std::make_unique_for_overwrite<std::byte[]>(output.bytes());
  {
    const nb::gil_scoped_release release;
    thread_local image::Scratch scratch;
    const image::SampleKey key{nostall::seed_of_occurrence(seed, occurrence), epoch, sample};
    auto result = pipeline.apply(bytes, key, scratch, {data.get(), output.bytes()});
    scratch.trim(kKeptScratch);
    std::move(result).take();
  }
  const size_t h = output.height, w = output.width;
  const nb::dlpack::dtype type = numpy_type(output.type);
  if (output.layout == image::Layout::chw) return to_numpy(std::move(data), {3, h, w}, type);
  return to_numpy(std::move(data), {h, w, 3}, type);
}

nb::object decode_rgb(nb::handle encoded, uint64_t max_pixels) {
  Bytes keep;
  const std::span<const std::byte> bytes = view(encoded, keep);
  std::unique_ptr<std::byte[]> data;
  size_t h = 0, w = 0;
  {
    const nb::gil_scoped_release release;
    image::Options options;
    options.max_pixels = max_pixels;
    const image::Decoded decoded = image::decode_rgb(bytes, options).take();
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
    options.pixels = {get<uint32_t>(*pixels, "height"), get<uint32_t>(*pixels, "width"),
                      get<uint32_t>(*pixels, "channels"), get<bool>(*pixels, "channels_first"),
                      get<bool>(*pixels, "bgr")};
  }
  return image::Pipeline::compile(native, options);
}

}  // namespace

void bind_image(nb::module_& m) {
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
      .def("apply", &apply, nb::arg("encoded"), nb::kw_only(), nb::arg("seed") = 0,
           nb::arg("epoch") = 0, nb::arg("sample") = 0, nb::arg("occurrence") = 0,
           "Decodes and transforms one image; random draws depend on the four numbers alone, of "
           "which "
           "`occurrence` counts how often the epoch had the sample before.");
  m.def("compile_pipeline", &compile, nb::arg("steps"), nb::arg("dtype") = nb::none(),
        nb::arg("layout") = nb::none(), nb::arg("max_pixels") = max_pixels,
        nb::arg("pixels") = nb::none(),
        "Compiles [(name, parameters), ...] into a Pipeline; `pixels` is for samples that are not "
        "encoded: height, width, channels, channels_first, bgr.");
  m.def("decode_rgb", &decode_rgb, nb::arg("encoded"), nb::arg("max_pixels") = max_pixels,
        "Decodes a JPEG, PNG or WebP image to uint8 RGB, height x width x 3.");
}
