// nostall._native.HorovodTimeline and TraceFilter: the hot part of timeline analytics.
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "module.h"
#include "text.h"
#include "timeline/horovod.h"
#include "timeline/scanner.h"

namespace nb = nanobind;
using namespace nostall;
using bindings::array_of;
using bindings::without_gil;

namespace {

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::str text(std::string_view bytes) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

void put_scan(nb::dict& out, const timeline::ScanReport& scan) {
  out["bytes"] = scan.bytes;
  out["events"] = scan.events;
  out["foreign"] = scan.foreign;
  out["damaged"] = scan.damaged;
  out["damaged_bytes"] = scan.damaged_bytes;
  out["first_damage"] = scan.first_damage;
  out["cut_off"] = scan.cut_off;
  out["closed"] = scan.closed;
  out["head"] = text(scan.head);
}

class Horovod {
 public:
  void feed(const nb::bytes& bytes) {
    const std::string_view data = view(bytes);
    without_gil([&] { scanner_.feed(data); });
  }

  void finish() {
    without_gil([&] {
      scanner_.finish();
      assembler_.finish();
    });
  }

  nb::dict take() {
    timeline::Operations ops = assembler_.take();
    nb::dict out;
    const auto column = [&](const char* name, auto field) {
      using T = std::decay_t<decltype(field(ops.rows.front()))>;
      std::vector<T> values;
      values.reserve(ops.rows.size());
      for (const timeline::Operation& row : ops.rows) values.push_back(field(row));
      out[name] = array_of(std::move(values));
    };
    column("tensor", [](const auto& o) { return o.tensor; });
    column("reduces", [](const auto& o) { return static_cast<uint8_t>(reduces(o.kind)); });
    column("round", [](const auto& o) { return o.round; });
    column("ticks", [](const auto& o) { return o.ticks; });
    column("negotiate_begin", [](const auto& o) { return o.negotiate_begin; });
    column("negotiate_end", [](const auto& o) { return o.negotiate_end; });
    column("reduce_begin", [](const auto& o) { return o.reduce_begin; });
    column("reduce_end", [](const auto& o) { return o.reduce_end; });
    column("bytes", [](const auto& o) { return o.bytes; });
    column("offset", [](const auto& o) { return o.offset; });
    out["tick_rank"] = array_of(std::move(ops.tick_rank));
    out["tick_time"] = array_of(std::move(ops.tick_time));
    return out;
  }

  uint32_t closed_rounds() const { return assembler_.closed_rounds(); }

  nb::list tensors() const {
    nb::list out;
    for (const std::string& name : assembler_.tensors()) out.append(text(name));
    return out;
  }

  nb::dict report() const {
    nb::dict out;
    put_scan(out, scanner_.report());
    const timeline::HorovodReport& found = assembler_.report();
    out["abandoned"] = found.abandoned;
    out["first_abandoned"] = found.first_abandoned;
    out["stray"] = found.stray;
    out["untimed"] = found.untimed;
    out["first_untimed"] = found.first_untimed;
    out["jumps"] = found.jumps;
    out["first_jump"] = found.first_jump;
    return out;
  }

 private:
  timeline::HorovodAssembler assembler_;
  timeline::Scanner scanner_{
      [this](const timeline::Event& event, uint64_t offset) { assembler_.add(event, offset); }};
};

// Keeps the text of events whose name begins with, or whose category is, one of the given.
class Filter {
 public:
  Filter(std::vector<std::string> names, std::vector<std::string> categories)
      : names_(std::move(names)), categories_(std::move(categories)) {}

  void feed(const nb::bytes& bytes) {
    const std::string_view data = view(bytes);
    without_gil([&] { scanner_.feed(data); });
  }

  void finish() {
    without_gil([&] { scanner_.finish(); });
  }

  nb::list take() {
    nb::list out;
    for (const auto& [offset, raw] : kept_) {
      out.append(nb::make_tuple(offset, nb::bytes(raw.data(), raw.size())));
    }
    kept_.clear();
    return out;
  }

  nb::dict report() const {
    nb::dict out;
    put_scan(out, scanner_.report());
    return out;
  }

 private:
  bool wanted(const timeline::Event& event) const {
    for (const std::string& name : names_) {
      if (event.name.substr(0, name.size()) == name) return true;
    }
    for (const std::string& category : categories_) {
      if (event.category == category) return true;
    }
    return false;
  }

  std::vector<std::string> names_;
  std::vector<std::string> categories_;
  std::vector<std::pair<uint64_t, std::string>> kept_;
  timeline::Scanner scanner_{[this](const timeline::Event& event, uint64_t offset) {
    if (event.phase != 0 && wanted(event)) kept_.emplace_back(offset, event.raw);
  }};
};

}  // namespace

void bind_timeline(nb::module_& m) {
  nb::class_<Horovod>(m, "HorovodTimeline",
                      "Operations of a Horovod timeline (native/timeline/horovod.h).")
      .def(nb::init<>())
      .def("feed", &Horovod::feed, nb::arg("data"))
      .def("finish", &Horovod::finish)
      .def("take", &Horovod::take)
      .def_prop_ro("closed_rounds", &Horovod::closed_rounds)
      .def_prop_ro("tensors", &Horovod::tensors)
      .def_prop_ro("report", &Horovod::report);
  nb::class_<Filter>(m, "TraceFilter",
                     "Chosen events of a Chrome-format trace (native/timeline/scanner.h).")
      .def(nb::init<std::vector<std::string>, std::vector<std::string>>(), nb::arg("names"),
           nb::arg("categories"))
      .def("feed", &Filter::feed, nb::arg("data"))
      .def("finish", &Filter::finish)
      .def("take", &Filter::take)
      .def_prop_ro("report", &Filter::report);
}
