// nostall._native.trace_*: recording what happens (native/trace/trace.h).
#include "trace/trace.h"

#include <nanobind/stl/tuple.h>

#include "arrays.h"
#include "module.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;

void bind_trace(nb::module_& m) {
  m.def(
      "trace_start",
      [](const std::string& path, uint32_t rank, uint32_t world) {
        bindings::without_gil([&] { trace::start({path, rank, world}); });
      },
      nb::arg("path"), nb::arg("rank"), nb::arg("world"));
  m.def(
      "trace_stop",
      [] {
        const trace::Summary s = bindings::without_gil([] { return trace::stop(); });
        return std::make_tuple(s.events, s.dropped, s.bytes);
      },
      "Events written, events dropped, bytes of the file.");
  m.def("trace_on", &trace::on);
  m.def(
      "trace_kind",
      [](const std::string& category, const std::string& name) {
        return trace::define(category, name).index;
      },
      nb::arg("category"), nb::arg("name"));
  m.def("trace_now", &now_ns, "Nanoseconds of the clock of all events.");
  m.def(
      "trace_record",
      [](uint16_t kind, int64_t begin, int64_t end) { trace::record({kind}, begin, end); },
      nb::arg("kind"), nb::arg("begin"), nb::arg("end"),
      "Nothing while not recording; `kind` from trace_kind.");
}
