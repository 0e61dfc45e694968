// nostall._native.NodeReader, and tiers of the user's own.
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>

#include "arrays.h"
#include "base/error.h"
#include "held.h"
#include "module.h"
#include "python_store.h"
#include "stage/node_reader.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;

namespace {

// Calls put(key, bytes) and get(key) of an object of Python, whose exceptions become errors.
class PythonStore : public tier::Store {
 public:
  explicit PythonStore(nb::object tier) : tier_(std::move(tier)) {}

  void put(uint64_t dataset, uint64_t sample, std::span<const std::byte> bytes) override {
    const nb::gil_scoped_acquire gil;
    try {
      const nb::bytes given(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      tier_.get().attr("put")(key(dataset, sample), given);
    } catch (nb::python_error& error) {
      throw failed(error);
    }
  }

  bool get(uint64_t dataset, uint64_t sample, std::span<std::byte> into) override {
    const nb::gil_scoped_acquire gil;
    try {
      const nb::object found = tier_.get().attr("get")(key(dataset, sample));
      if (found.is_none()) return false;
      const nb::object view = nb::steal(PyMemoryView_FromObject(found.ptr()));
      if (!view.is_valid()) throw nb::python_error();
      const nb::bytes flat = nb::cast<nb::bytes>(view.attr("tobytes")());
      if (flat.size() != into.size()) {
        throw Error(ErrorKind::corruption, "get() gave " + std::to_string(flat.size()) +
                                               " bytes for " + std::to_string(into.size()) +
                                               " that were put");
      }
      std::memcpy(into.data(), flat.c_str(), flat.size());
      return true;
    } catch (nb::python_error& error) {
      throw failed(error);
    }
  }

 private:
  static std::string key(uint64_t dataset, uint64_t sample) {
    char text[48];
    std::snprintf(text, sizeof text, "nostall/%016llx/%llu",
                  static_cast<unsigned long long>(dataset),
                  static_cast<unsigned long long>(sample));
    return text;
  }
  static Error failed(nb::python_error& error) {
    const std::string type = bindings::text_of(error.type().attr("__name__"));
    const std::string why = bindings::text_of(error.value());
    bindings::pass_on_interrupt(error);
    return Error(ErrorKind::io, type + ": " + why);
  }

  bindings::Held tier_;
};

// Both to attach and to leave may wait for other processes.
std::shared_ptr<stage::NodeReader> make_reader(std::shared_ptr<const source::Source> source,
                                               const std::string& job,
                                               std::vector<tier::TierSpec> tiers) {
  const nb::gil_scoped_release release;
  return {
      new stage::NodeReader(std::move(source), job, std::move(tiers), bindings::look_at_signals),
      [](stage::NodeReader* reader) {
        const nb::gil_scoped_release release_too;
        delete reader;
      }};
}

nb::list read_all(stage::NodeReader& reader, const std::vector<uint64_t>& samples) {
  std::vector<std::span<std::byte>> into;
  nb::list out;
  for (const uint64_t sample : samples) {
    if (sample >= reader.source().size()) throw nb::index_error();
    const uint64_t size = reader.source().sizes()[sample];
    const nb::object bytes =
        nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    if (!bytes.is_valid()) throw nb::python_error();
    // Nothing else refers to the object until it is filled.
    into.emplace_back(reinterpret_cast<std::byte*>(PyBytes_AsString(bytes.ptr())), size);
    out.append(bytes);
  }
  const nb::gil_scoped_release release;
  reader.read(samples, into);
  return out;
}

}  // namespace

namespace nostall::bindings {

std::shared_ptr<tier::Store> python_store(nb::object tier) {
  return std::make_shared<PythonStore>(std::move(tier));
}

}  // namespace nostall::bindings

void bind_tiers(nb::module_& m) {
  using stage::NodeReader;
  nb::class_<NodeReader>(
      m, "NodeReader", "Samples in any order through a node's tiers (native/stage/node_reader.h).",
      nb::is_weak_referenceable())
      .def(nb::new_(&make_reader), nb::arg("source"), nb::arg("job"), nb::arg("tiers"))
      .def("read", &read_all, nb::arg("samples"),
           nb::sig("def read(self, samples: list[int]) -> list[bytes]"),
           "The bytes of each sample.")
      .def_prop_ro("ram_bytes", &NodeReader::ram_bytes)
      .def_prop_ro("file_bytes", &NodeReader::file_bytes)
      .def_prop_ro(
          "taken",
          [](const NodeReader& r) {
            return std::map<std::string, uint64_t>{{"ram", r.taken(stage::Origin::ram)},
                                                   {"file", r.taken(stage::Origin::file)},
                                                   {"source", r.taken(stage::Origin::source)}};
          },
          "Samples that this process took, by where from.");
}
