// nostall._native: the kinds of fields, Field and compile_program.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "fields/images.h"
#include "fields/program.h"
#include "held.h"
#include "module.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;

namespace {

fields::Type type_named(const std::string& name) { return fields::type_named(name).take(); }

// A property of a field of type fields::Type, by NumPy's name.
template <typename T>
void bind_type(nb::class_<T>& kind) {
  kind.def_prop_rw(
      "type", [](const T& k) { return std::string(fields::name_of(k.type)); },
      [](T& k, const std::string& name) { k.type = type_named(name); });
}

// Values by a function: (bytes, draw) -> (shape, array of bytes). Takes the GIL for each call of it.
class PythonDecoder : public fields::Decoder {
 public:
  explicit PythonDecoder(nb::object function) : function_(std::move(function)) {}

  Result<std::monostate> decode(std::span<const std::byte> stored, uint64_t draw, image::Scratch&,
                                const Take& take) const override {
    using Values = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    const nb::gil_scoped_acquire gil;
    try {
      const nb::bytes bytes(reinterpret_cast<const char*>(stored.data()), stored.size());
      const auto made = nb::cast<nb::tuple>(function_.get()(bytes, draw));
      const auto shape = nb::cast<std::vector<int64_t>>(made[0]);
      const auto values = nb::cast<Values>(made[1]);
      return take(shape, std::as_bytes(std::span(values.data(), values.size())));
    } catch (nb::python_error& error) {
      const nb::object errors = nb::module_::import_("nostall.errors");
      const nb::handle value = error.value();
      if (error.matches(errors.attr("CorruptionError")))
        return Error(ErrorKind::corruption, bindings::text_of(value));
      const bool told = error.matches(errors.attr("TransformError"));
      return Error(ErrorKind::transform,
                   told ? bindings::text_of(value) : bindings::traceback_of(value));
    }
  }

 private:
  bindings::Held function_;
};

void bind_codecs(nb::module_& m) {
  nb::enum_<fields::Scalar::Codec>(m, "ScalarCodec")
      .value("raw", fields::Scalar::Codec::raw)
      .value("decimal", fields::Scalar::Codec::decimal)
      .value("varint", fields::Scalar::Codec::varint)
      .value("msgpack", fields::Scalar::Codec::msgpack);
  nb::enum_<fields::Array::Codec>(m, "ArrayCodec")
      .value("raw", fields::Array::Codec::raw)
      .value("npy", fields::Array::Codec::npy)
      .value("varint", fields::Array::Codec::varint)
      .value("msgpack", fields::Array::Codec::msgpack);
  nb::enum_<fields::Array::Meaning>(m, "ArrayMeaning")
      .value("none", fields::Array::Meaning::none)
      .value("xyxy", fields::Array::Meaning::xyxy)
      .value("xywh", fields::Array::Meaning::xywh)
      .value("cxcywh", fields::Array::Meaning::cxcywh)
      .value("keypoints", fields::Array::Meaning::keypoints);
}

void bind_token_parts(nb::module_& m) {
  nb::enum_<fields::Tokens::Part>(m, "TokenPart")
      .value("ids", fields::Tokens::Part::ids)
      .value("labels", fields::Tokens::Part::labels)
      .value("positions", fields::Tokens::Part::positions)
      .value("segments", fields::Tokens::Part::segments)
      .value("lengths", fields::Tokens::Part::lengths);
  auto tokens = nb::class_<fields::Tokens>(m, "TokensField", "A part of a unit of tokens.");
  tokens.def(nb::init<>())
      .def_rw("part", &fields::Tokens::part)
      .def_prop_rw(
          "stored", [](const fields::Tokens& t) { return std::string(fields::name_of(t.stored)); },
          [](fields::Tokens& t, const std::string& name) { t.stored = type_named(name); })
      .def_rw("length", &fields::Tokens::length)
      .def_rw("pad", &fields::Tokens::pad)
      .def_rw("ignored", &fields::Tokens::ignored)
      .def_prop_rw(
          "mask",
          [](const fields::Tokens& t) -> std::optional<std::string> {
            if (!t.mask) return std::nullopt;
            return std::string(fields::name_of(*t.mask));
          },
          [](fields::Tokens& t, const std::string& name) { t.mask = type_named(name); })
      .def_rw("vocabulary", &fields::Tokens::vocabulary);
  bind_type(tokens);
}

void bind_custom(nb::module_& m) {
  nb::class_<fields::Decoder>(m, "Decoder", "What decodes a kind of the user's own.");
  m.def(
      "python_decoder",
      [](nb::callable function) -> std::shared_ptr<fields::Decoder> {
        return std::make_shared<PythonDecoder>(std::move(function));
      },
      nb::arg("function"), "Decodes by a function: (bytes, draw) -> (shape, its bytes as uint8).");
  auto custom = nb::class_<fields::Custom>(m, "CustomField", "What a Decoder gives.");
  custom.def(nb::init<>())
      .def_rw("shape", &fields::Custom::shape)
      .def_rw("decoder", &fields::Custom::decoder);
  bind_type(custom);
}

void bind_kinds(nb::module_& m) {
  bind_codecs(m);
  nb::class_<fields::Image>(m, "ImageField", "An image that a pipeline decodes.")
      .def(nb::init<>())
      .def_rw("pipeline", &fields::Image::pipeline);
  nb::class_<fields::Bytes>(m, "BytesField", "Bytes as they are.").def(nb::init<>());
  nb::class_<fields::Text>(m, "TextField", "UTF-8, or JSON.")
      .def(nb::init<>())
      .def_rw("json", &fields::Text::json);
  auto scalar = nb::class_<fields::Scalar>(m, "ScalarField", "A number.");
  scalar.def(nb::init<>())
      .def_rw("codec", &fields::Scalar::codec)
      .def_prop_rw(
          "stored",
          [](const fields::Scalar& s) -> std::optional<std::string> {
            if (!s.stored) return std::nullopt;
            return std::string(fields::name_of(*s.stored));
          },
          [](fields::Scalar& s, const std::string& name) { s.stored = type_named(name); });
  bind_type(scalar);
  auto array = nb::class_<fields::Array>(m, "ArrayField", "Numbers; -1 in `shape` is ragged.");
  array.def(nb::init<>())
      .def_rw("shape", &fields::Array::shape)
      .def_rw("codec", &fields::Array::codec)
      .def_rw("meaning", &fields::Array::meaning)
      .def_rw("normalised", &fields::Array::normalised)
      .def_rw("pipeline", &fields::Array::pipeline)
      .def_rw("rows_of", &fields::Array::rows_of);
  bind_type(array);
  auto mask = nb::class_<fields::Mask>(m, "MaskField", "A PNG image of integers.");
  mask.def(nb::init<>())
      .def_rw("height", &fields::Mask::height)
      .def_rw("width", &fields::Mask::width)
      .def_rw("max_pixels", &fields::Mask::max_pixels)
      .def_rw("pipeline", &fields::Mask::pipeline);
  bind_type(mask);
  auto audio = nb::class_<fields::Audio>(m, "AudioField", "A WAV file.");
  audio.def(nb::init<>())
      .def_rw("channels", &fields::Audio::channels)
      .def_rw("rate", &fields::Audio::rate)
      .def_rw("frames", &fields::Audio::frames);
  bind_type(audio);
  bind_token_parts(m);
  bind_custom(m);
  m.def("images_of_units", fields::images_of_units, nb::arg("pipeline"));
  m.def("places_in_units", fields::places_in_units);
}

}  // namespace

void bind_fields(nb::module_& m) {
  bind_kinds(m);
  using fields::Field;
  nb::class_<Field>(m, "Field", "A field of a source, and its kind (native/fields/program.h).")
      .def(nb::init<>())
      .def_rw("name", &Field::name)
      .def_rw("index", &Field::index)
      .def_rw("kind", &Field::kind)
      .def_rw("padded", &Field::padded)
      .def_prop_rw(
          "fill",
          [](const Field& f) -> std::optional<nb::bytes> {
            if (!f.fill) return std::nullopt;
            return nb::bytes(reinterpret_cast<const char*>(f.fill->data()), f.fill->size());
          },
          [](Field& f, const nb::bytes& fill) {
            const auto* begin = reinterpret_cast<const std::byte*>(fill.c_str());
            f.fill.emplace(begin, begin + fill.size());
          });
  nb::class_<fields::BatchMix>(m, "BatchMix", "What is mixed when a batch is complete.")
      .def(nb::init<>())
      .def_rw("mixing", &fields::BatchMix::mixing)
      .def_rw("images", &fields::BatchMix::images)
      .def_rw("labels", &fields::BatchMix::labels)
      .def_rw("draws_only", &fields::BatchMix::draws_only);
  nb::class_<fields::Program>(m, "Program", "Unpacks records (native/fields/program.h).")
      .def_prop_ro(
          "outputs",
          [](const fields::Program& program) {
            constexpr const char* kForms[] = {"dense", "ragged", "padded"};
            std::vector<std::tuple<std::string, std::string, std::vector<int64_t>, std::string>>
                out;
            for (const fields::Output& o : program.outputs()) {
              out.emplace_back(o.name, std::string(fields::name_of(o.type)), o.shape,
                               kForms[static_cast<size_t>(o.form)]);
            }
            return out;
          },
          "(name, dtype, shape of one sample, form) of each; -1 in a shape is ragged.")
      .def_prop_ro("light", &fields::Program::light,
                   "Whether unpacking costs little more than a copy.");
  m.def(
      "compile_program",
      [](std::vector<Field> fields, std::optional<fields::BatchMix> mix) {
        return fields::Program::compile(std::move(fields), std::move(mix));
      },
      nb::arg("fields"), nb::arg("mix") = nb::none());
}
