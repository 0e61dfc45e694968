// nostall._native.CompositeSource: parts of another source, and columns.
#include "source/composite.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <span>

#include "arrays.h"
#include "module.h"
#include "source/beside.h"
#include "source/gather.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;

namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T, typename Array>
std::vector<T> copy_of(const Array& array) {
  const auto* begin = reinterpret_cast<const T*>(array.data());
  return {begin, begin + array.size()};
}

}  // namespace

void bind_composite(nb::module_& m) {
  using source::Column;
  nb::class_<Column>(m, "Column", "One value of bytes a sample (native/source/composite.h).")
      .def(
          "__init__",
          [](Column* self, const Vector<uint8_t>& values, uint64_t width,
             const Vector<uint64_t>& ends, const Vector<uint8_t>& present) {
            new (self) Column{copy_of<std::byte>(values), width, copy_of<uint64_t>(ends),
                              copy_of<uint8_t>(present)};
          },
          nb::arg("values"), nb::arg("width"), nb::arg("ends"), nb::arg("present"),
          "Values of `width` bytes, or if that is 0 of those between the n + 1 `ends`; `present` "
          "is 0 "
          "where a sample has none, or empty.");
  using source::CompositeSource;
  nb::class_<CompositeSource, source::Source>(m, "CompositeSource")
      .def(
          "__init__",
          [](CompositeSource* self, std::vector<std::string> names,
             std::shared_ptr<const source::Source> parts, const Vector<uint32_t>& part_of,
             std::vector<Column> columns, const Vector<int64_t>& labels, uint64_t samples) {
            CompositeSource::Table table{samples,
                                         std::move(names),
                                         std::move(parts),
                                         copy_of<uint32_t>(part_of),
                                         std::move(columns),
                                         copy_of<int64_t>(labels)};
            const nb::gil_scoped_release release;
            new (self) CompositeSource(std::move(table));
          },
          nb::arg("names"), nb::arg("parts").none(), nb::arg("part_of"), nb::arg("columns"),
          nb::arg("labels"), nb::arg("samples"),
          "`names` of the fields of parts, then of the columns; `part_of` has the id of each "
          "sample's "
          "parts, 2**32 - 1 where there is none.")
      .def(
          "select",
          [](const CompositeSource& s, const std::vector<uint32_t>& fields) {
            return s.select(fields);
          },
          nb::arg("fields"), nb::call_guard<nb::gil_scoped_release>());
  using source::BesideSource;
  nb::class_<BesideSource, source::Source>(m, "BesideSource")
      .def(
          "__init__",
          [](BesideSource* self, std::vector<std::shared_ptr<const source::Source>> sources,
             const std::vector<std::pair<uint32_t, uint32_t>>& fields) {
            std::vector<BesideSource::Field> all;
            for (const auto& [first, last] : fields) all.push_back({first, last});
            const nb::gil_scoped_release release;
            new (self) BesideSource(std::move(sources), std::move(all));
          },
          nb::arg("sources"), nb::arg("fields"),
          "Records of all sources (native/source/beside.h); a field is those from one to another.");
  using source::GatherSource;
  nb::class_<GatherSource, source::Source>(m, "GatherSource")
      .def(
          "__init__",
          [](GatherSource* self, std::shared_ptr<const source::Source> source,
             const Vector<uint64_t>& begins, const Vector<uint32_t>& members) {
            std::vector<uint64_t> all(begins.data(), begins.data() + begins.size());
            std::vector<GatherSource::Member> of(members.size() / 3);
            for (size_t i = 0; i < of.size(); ++i) {
              of[i] = {members(3 * i), members(3 * i + 1), members(3 * i + 2)};
            }
            const nb::gil_scoped_release release;
            new (self) GatherSource(std::move(source), std::move(all), std::move(of));
          },
          nb::arg("source"), nb::arg("begins"), nb::arg("members"),
          "Several samples as one (native/source/gather.h); of each its number, and two numbers "
          "more.");
}
