// The plan's functions; arrays are NumPy's, on memory that the result owns.
#include "plan/plan.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "arrays.h"
#include "base/error.h"
#include "module.h"
#include "plan/bound.h"
#include "plan/mixture.h"
#include "plan/owners.h"
#include "plan/permutation.h"
#include "plan/placement.h"
#include "plan/stand_in.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;

using Weights = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Buckets = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

void bind_mixture(nb::module_& m) {
  using Changes = std::vector<std::pair<uint64_t, std::vector<double>>>;
  nb::enum_<plan::AtEnd>(m, "AtEnd")
      .value("repeat", plan::AtEnd::repeat)
      .value("stop", plan::AtEnd::stop)
      .value("reweight", plan::AtEnd::reweight);
  nb::class_<plan::Mixture>(m, "Mixture", "Sources in one order by weights (plan/mixture.h).")
      .def(
          "__init__",
          [](plan::Mixture* self, std::vector<uint64_t> samples, const Changes& changes,
             plan::AtEnd at_end) {
            plan::Mixture::Spec spec{std::move(samples), {}, at_end};
            for (const auto& [place, weights] : changes) spec.changes.push_back({place, weights});
            bindings::without_gil([&] { new (self) plan::Mixture(std::move(spec)); });
          },
          nb::arg("samples"), nb::arg("changes"), nb::arg("at_end"))
      .def_prop_ro(
          "end",
          [](const plan::Mixture& mixture) -> std::optional<uint64_t> {
            if (mixture.end() == plan::Mixture::kEndless) return std::nullopt;
            return mixture.end();
          },
          "Places until the mixture ends; None if sources repeat.")
      .def(
          "counts",
          [](const plan::Mixture& mixture, uint64_t place) {
            return bindings::array_of(bindings::without_gil([&] { return mixture.counts(place); }));
          },
          nb::arg("place"), "Places that each source had before this one.")
      .def("fingerprint", &plan::Mixture::fingerprint, nb::arg("place") = plan::Mixture::kEndless,
           "64-bit hash of all that decides the places before this one.")
      .def_prop_ro("worked_out", &plan::Mixture::worked_out,
                   "Places of patterns that were worked out so far.");
}

void bind_job(nb::module_& m) {
  nb::enum_<plan::OrderKind>(m, "OrderKind")
      .value("torch", plan::OrderKind::torch)
      .value("keyed", plan::OrderKind::keyed)
      .value("user", plan::OrderKind::user)
      .value("sequential", plan::OrderKind::sequential)
      .value("sub_batch", plan::OrderKind::sub_batch)
      .value("weighted", plan::OrderKind::weighted)
      .value("repeated", plan::OrderKind::repeated)
      .value("mixture", plan::OrderKind::mixture)
      .value("bucketed", plan::OrderKind::bucketed);
  nb::enum_<plan::Scheme>(m, "Scheme")
      .value("uniform", plan::Scheme::uniform)
      .value("whole", plan::Scheme::whole)
      .value("imbalanced", plan::Scheme::imbalanced);

  nb::class_<plan::JobSpec>(m, "JobSpec", "What fixes the future of a job (native/plan/plan.h).")
      .def(nb::init<>())
      .def_rw("samples", &plan::JobSpec::samples)
      .def_rw("global_batch", &plan::JobSpec::global_batch)
      .def_rw("epochs", &plan::JobSpec::epochs)
      .def_rw("world", &plan::JobSpec::world)
      .def_rw("order_world", &plan::JobSpec::order_world)
      .def_rw("seed", &plan::JobSpec::seed)
      .def_rw("drop_last", &plan::JobSpec::drop_last)
      .def_rw("order", &plan::JobSpec::order)
      .def_rw("scheme", &plan::JobSpec::scheme)
      .def_rw("draws", &plan::JobSpec::draws)
      .def_rw("replacement", &plan::JobSpec::replacement)
      .def_rw("times", &plan::JobSpec::times)
      .def_rw("steps", &plan::JobSpec::steps)
      .def_prop_rw(
          "weights",
          [](const plan::JobSpec& spec) {
            return bindings::array_of(spec.weights ? *spec.weights : std::vector<double>{});
          },
          [](plan::JobSpec& spec, const Weights& weights) {
            spec.weights = std::make_shared<const std::vector<double>>(
                weights.data(), weights.data() + weights.size());
          })
      .def_prop_rw(
          "mixture",
          [](const plan::JobSpec& spec) {
            return std::const_pointer_cast<plan::Mixture>(spec.mixture);
          },
          [](plan::JobSpec& spec, std::shared_ptr<plan::Mixture> mixture) {
            spec.mixture = std::move(mixture);
          })
      .def_prop_rw(
          "buckets",
          [](const plan::JobSpec& spec) {
            return bindings::array_of(spec.buckets ? *spec.buckets : std::vector<uint32_t>{});
          },
          [](plan::JobSpec& spec, const Buckets& buckets) {
            spec.buckets = std::make_shared<const std::vector<uint32_t>>(
                buckets.data(), buckets.data() + buckets.size());
          })
      .def_prop_rw(
          "sub_batches",
          [](const plan::JobSpec& spec) {
            const plan::SubBatches& s = spec.sub_batches;
            return std::tuple{s.reuse, s.resident, s.together};
          },
          [](plan::JobSpec& spec, const std::tuple<uint32_t, uint64_t, uint32_t>& values) {
            const auto& [reuse, resident, together] = values;
            spec.sub_batches = {reuse, resident, together};
          })
      .def_prop_rw(
          "user_order",
          // The ids themselves, which are as large as the data set's index: not a copy.
          [](const plan::JobSpec& spec) {
            using Order = std::shared_ptr<const std::vector<plan::SampleId>>;
            auto kept = std::make_unique<Order>(
                spec.user_order ? spec.user_order
                                : std::make_shared<std::vector<plan::SampleId>>());
            const std::vector<plan::SampleId>& ids = **kept;
            return nb::ndarray<nb::numpy, const plan::SampleId, nb::ndim<1>>(
                ids.data(), {ids.size()}, bindings::owner_of(std::move(kept)));
          },
          [](plan::JobSpec& spec, const bindings::Ids& ids) {
            spec.user_order = std::make_shared<const std::vector<plan::SampleId>>(
                ids.data(), ids.data() + ids.size());
          },
          nb::for_getter(nb::rv_policy::automatic));
}

void bind_orders(nb::module_& m) {
  m.def("validate", &plan::validate, nb::arg("spec"));
  m.def(
      "pass_of",
      [](const plan::JobSpec& spec, uint32_t epoch, uint64_t batch) {
        const plan::Pass at = plan::pass_of(spec, epoch, batch);
        return std::tuple{at.chunk, at.pass, at.place, at.size};
      },
      nb::arg("spec"), nb::arg("epoch"), nb::arg("batch"),
      "(chunk, pass over it, place in the pass, batches of the chunk) of a global batch.");
  m.def("epoch_length", &plan::epoch_length, nb::arg("spec"));
  m.def("batches_per_epoch", &plan::batches_per_epoch, nb::arg("spec"));
  m.def("batches_in", &plan::batches_in, nb::arg("spec"), nb::arg("epoch"));
  nb::class_<plan::StandIns>(m, "StandIns", "What may stand in for bad samples (plan/stand_in.h).")
      .def(nb::init<const plan::JobSpec&>(), nb::arg("job"), nb::keep_alive<1, 2>())
      .def(
          "of",
          [](const plan::StandIns& stand_ins, uint64_t bad) {
            plan::StandIns::Candidates candidates = stand_ins.of(bad);
            std::vector<uint64_t> out(plan::StandIns::kMost);
            for (uint64_t& candidate : out) candidate = candidates.next();
            return bindings::array_of(std::move(out));
          },
          nb::arg("bad"),
          "The samples that may stand in for `bad`, in the order in which they are tried.");
  m.attr("STAND_IN_READS") = plan::StandIns::kReads;
  m.def("none_stands_in", &plan::none_stands_in, nb::arg("unusable"), nb::arg("tried"),
        "The message for a sample when none stands in its place.");
  m.def("plan_fingerprint", &plan::fingerprint, nb::arg("spec"));
  m.def(
      "epoch_order",
      [](const plan::JobSpec& spec, uint32_t epoch) {
        return bindings::array_of(
            bindings::without_gil([&] { return plan::epoch_order(spec, epoch); }));
      },
      nb::arg("spec"), nb::arg("epoch"));
  m.def(
      "rank_epoch",
      [](const plan::JobSpec& spec, uint32_t epoch, uint32_t rank) {
        plan::RankEpoch result =
            bindings::without_gil([&] { return plan::rank_epoch(spec, epoch, rank); });
        return nb::make_tuple(bindings::array_of(std::move(result.samples)),
                              bindings::array_of(std::move(result.batch_ends)));
      },
      nb::arg("spec"), nb::arg("epoch"), nb::arg("rank"),
      "The samples of one rank in one epoch, and where each of its batches ends.");
}

void bind_places(nb::module_& m) {
  m.def(
      "node_access",
      [](const plan::JobSpec& spec, uint32_t first_rank, uint32_t ranks) {
        plan::NodeAccess access =
            bindings::without_gil([&] { return plan::node_access(spec, first_rank, ranks); });
        return nb::make_tuple(bindings::array_of(std::move(access.frequency)),
                              bindings::array_of(std::move(access.first_access)));
      },
      nb::arg("spec"), nb::arg("first_rank"), nb::arg("ranks"),
      "Accesses of every sample by the node, and the time of the first.");
  m.def(
      "place",
      [](const bindings::Ids& sizes, const plan::JobSpec& spec, uint32_t first_rank, uint32_t ranks,
         const std::vector<uint64_t>& capacities, uint32_t overhead) {
        std::vector<plan::TierShape> shapes;
        for (const uint64_t c : capacities) shapes.push_back({c, overhead});
        plan::Placement placement = bindings::without_gil([&] {
          return plan::place({sizes.data(), sizes.size()},
                             plan::node_access(spec, first_rank, ranks), shapes);
        });
        return nb::make_tuple(bindings::array_of(std::move(placement.tier)),
                              bindings::array_of(std::move(placement.offset)), placement.used);
      },
      nb::arg("sizes"), nb::arg("spec"), nb::arg("first_rank"), nb::arg("ranks"),
      nb::arg("capacities"), nb::arg("overhead") = 0,
      "Tier (255: none) and offset of every sample, and bytes used by tier.");
  m.def(
      "owners",
      [](const plan::JobSpec& spec, const bindings::Ids& sizes,
         const std::vector<uint64_t>& capacities, uint32_t ranks_per_node) {
        return bindings::array_of(bindings::without_gil([&] {
          return plan::owners(spec, {sizes.data(), sizes.size()},
                              plan::equal_nodes(spec, capacities, ranks_per_node))
              .owner;
        }));
      },
      nb::arg("spec"), nb::arg("sizes"), nb::arg("capacities"), nb::arg("ranks_per_node"),
      "The node that keeps each sample; 2**32 - 1 where none has room.");
  m.def(
      "source_bytes_lower_bound",
      [](const plan::JobSpec& spec, const bindings::Ids& sizes, uint64_t capacity,
         uint32_t first_epoch, uint64_t first_batch,
         const std::optional<std::vector<uint32_t>>& epochs) {
        return bindings::without_gil([&] {
          const std::span<const uint64_t> all(sizes.data(), sizes.size());
          const plan::Position begin{first_epoch, first_batch};
          return epochs ? plan::source_bytes_lower_bound(spec, all, capacity, begin, *epochs)
                        : plan::source_bytes_lower_bound(spec, all, capacity, begin);
        });
      },
      nb::arg("spec"), nb::arg("sizes"), nb::arg("capacity"), nb::arg("first_epoch") = 0,
      nb::arg("first_batch") = 0, nb::arg("epochs") = nb::none(),
      "The fewest bytes to read from the source, of all epochs or of these.");
}

}  // namespace

void bind_plan(nb::module_& m) {
  bind_mixture(m);
  bind_job(m);
  bind_orders(m);
  bind_places(m);
  nb::class_<plan::KeyedPermutation>(m, "KeyedPermutation")
      .def(nb::init<uint64_t, uint64_t, uint32_t>(), nb::arg("n"), nb::arg("seed"),
           nb::arg("epoch"))
      .def("__call__", &plan::KeyedPermutation::operator(), nb::arg("position"))
      .def("inverse", &plan::KeyedPermutation::inverse, nb::arg("sample"));
}
