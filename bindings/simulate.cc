// The simulator: machines, decisions and the two engines.
#include "simulate/simulate.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "module.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;

namespace {

using Samples = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Megabytes = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Simulation = simulate::Result (*)(const simulate::Model&, const plan::JobSpec&,
                                        std::span<const double>, const simulate::Decision&);

std::vector<uint32_t> to_vector(const Samples& samples) {
  return {samples.data(), samples.data() + samples.size()};
}

template <Simulation simulation>
simulate::Result run(const simulate::Model& model, const plan::JobSpec& spec,
                     const Megabytes& sizes, const simulate::Decision& decision) {
  return bindings::without_gil([&] {
    return simulation(model, spec, {sizes.data(), sizes.size()}, decision);
  });
}

void bind_model(nb::module_& m) {
  nb::class_<simulate::StorageClass>(m, "StorageClass", "One class of Table 3.1; MB and MB/s.")
      .def(nb::init<>())
      .def_rw("capacity", &simulate::StorageClass::capacity)
      .def_rw("threads", &simulate::StorageClass::threads)
      .def_rw("read", &simulate::StorageClass::read)
      .def_rw("write", &simulate::StorageClass::write);
  nb::class_<simulate::Model>(m, "Model", "The machine (native/simulate/model.h).")
      .def(nb::init<>())
      .def_rw("nodes", &simulate::Model::nodes)
      .def_rw("compute", &simulate::Model::compute)
      .def_rw("preprocess", &simulate::Model::preprocess)
      .def_rw("network", &simulate::Model::network)
      .def_rw("source_link", &simulate::Model::source_link)
      .def_rw("source", &simulate::Model::source)
      .def_rw("classes", &simulate::Model::classes)
      .def_rw("step_seconds", &simulate::Model::step_seconds);
  m.def("validate_model", &simulate::validate, nb::arg("model"));
  m.def("interpolate", &simulate::interpolate, nb::arg("curve"), nb::arg("at"), "Equation 4.1.");
}

void bind_decision(nb::module_& m) {
  nb::enum_<simulate::Loading>(m, "Loading")
      .value("perfect", simulate::Loading::perfect)
      .value("on_demand", simulate::Loading::on_demand)
      .value("staged", simulate::Loading::staged);
  nb::enum_<simulate::Filling>(m, "Filling")
      .value("none", simulate::Filling::none)
      .value("prefetch", simulate::Filling::prefetch)
      .value("reading", simulate::Filling::reading)
      .value("evicting", simulate::Filling::evicting)
      .value("before", simulate::Filling::before);
  nb::enum_<plan::CopyRule>(m, "CopyRule",
                            "What a node keeps beside what it owns (native/plan/cluster.h).")
      .value("none", plan::CopyRule::none)
      .value("fixed", plan::CopyRule::fixed)
      .value("next_use", plan::CopyRule::next_use);
  nb::class_<simulate::Decision>(m, "Decision",
                                 "What a policy decides (native/simulate/decision.h).")
      .def(nb::init<>())
      .def_rw("loading", &simulate::Decision::loading)
      .def_rw("filling", &simulate::Decision::filling)
      .def_rw("stage_remote", &simulate::Decision::stage_remote)
      .def_rw("stage_source", &simulate::Decision::stage_source)
      .def_rw("cleanup", &simulate::Decision::cleanup)
      .def_prop_ro("nodes", [](const simulate::Decision& l) { return l.keep.size(); })
      .def(
          "kept",
          [](const simulate::Decision& l, size_t node, size_t storage_class) {
            return bindings::array_of(l.keep.at(node).at(storage_class - 1));
          },
          nb::arg("node"), nb::arg("storage_class"), "What the node keeps there, in fill order.")
      .def(
          "set_kept",
          [](simulate::Decision& l, const std::vector<std::vector<Samples>>& keep) {
            l.keep.clear();
            for (const auto& node : keep) {
              auto& lists = l.keep.emplace_back();
              for (const auto& list : node) lists.push_back(to_vector(list));
            }
          },
          nb::arg("keep"), "keep[node][class - 1]: sample ids in fill order.")
      .def(
          "set_owner",
          [](simulate::Decision& l, const Samples& owner) { l.owner = to_vector(owner); },
          nb::arg("owner"), "The node of every sample, 2**32 - 1 for none.")
      .def(
          "set_order",
          [](simulate::Decision& l, const std::vector<Samples>& order) {
            l.order.clear();
            for (const auto& list : order) l.order.push_back(to_vector(list));
          },
          nb::arg("order"), "order[epoch * nodes + node]: sample ids.")
      .def(
          "order",
          [](const simulate::Decision& l, size_t index) {
            return bindings::array_of(l.order.at(index));
          },
          nb::arg("index"));
}

void bind_layout(nb::module_& m) {
  bind_decision(m);
  m.def(
      "keep_frequent",
      [](const plan::JobSpec& spec, const bindings::Ids& bytes,
         const std::vector<uint64_t>& capacities, bool in_order) {
        return bindings::without_gil([&] {
          return simulate::keep_frequent(spec, {bytes.data(), bytes.size()}, capacities, in_order);
        });
      },
      nb::arg("spec"), nb::arg("bytes"), nb::arg("capacities"), nb::arg("in_order") = true);
  m.def(
      "keep_owned",
      [](const plan::JobSpec& spec, const bindings::Ids& bytes,
         const std::vector<uint64_t>& capacities, plan::CopyRule copies) {
        return bindings::without_gil([&] {
          return simulate::keep_owned(spec, {bytes.data(), bytes.size()}, capacities, copies);
        });
      },
      nb::arg("spec"), nb::arg("bytes"), nb::arg("capacities"), nb::arg("copies"));
  m.def(
      "first_readers",
      [](const plan::JobSpec& spec) {
        return bindings::array_of(
            bindings::without_gil([&] { return simulate::first_readers(spec); }));
      },
      nb::arg("spec"));
  m.def("read_own_only", &simulate::read_own_only, nb::arg("spec"), nb::arg("decision"),
        nb::call_guard<nb::gil_scoped_release>());
  m.def("read_local_first", &simulate::read_local_first, nb::arg("spec"), nb::arg("decision"),
        nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_simulate(nb::module_& m) {
  bind_model(m);
  bind_layout(m);
  nb::class_<simulate::Result>(m, "SimulationResult", "Seconds and MB (simulate/simulate.h).")
      .def_ro("seconds", &simulate::Result::seconds)
      .def_ro("initial_seconds", &simulate::Result::initial_seconds)
      .def_ro("warm_seconds", &simulate::Result::warm_seconds)
      .def_prop_ro(
          "batch_seconds",
          [](const simulate::Result& r) { return bindings::array_of(r.batch_seconds); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "compute_seconds",
          [](const simulate::Result& r) { return bindings::array_of(r.compute_seconds); },
          nb::rv_policy::automatic)
      .def_ro("node_stall", &simulate::Result::node_stall)
      .def_ro("epoch_seconds", &simulate::Result::epoch_seconds)
      .def_ro("staged", &simulate::Result::staged)
      .def_ro("kept_from_nodes", &simulate::Result::kept_from_nodes)
      .def_ro("kept_from_source", &simulate::Result::kept_from_source)
      .def_ro("epoch_source", &simulate::Result::epoch_source);
  m.def("simulate_published", &run<simulate::published>, nb::arg("model"), nb::arg("spec"),
        nb::arg("sizes"), nb::arg("decision"));
  m.def("simulate_consistent", &run<simulate::consistent>, nb::arg("model"), nb::arg("spec"),
        nb::arg("sizes"), nb::arg("decision"));
}
