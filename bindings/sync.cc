// The gradient engine, on the collectives of one node, of several nodes by a network from Python, or
// on collectives that are Python's altogether.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>

#include "arrays.h"
#include "base/error.h"
#include "module.h"
#include "python_leaders.h"
#include "seconds.h"
#include "sync/gradient_engine.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;

namespace {

using Specs = std::vector<std::tuple<std::string, uint64_t, std::string, std::string>>;
using Groups = std::vector<std::vector<uint32_t>>;

collective::DataType type_of(const std::string& name) {
  const auto type = collective::find_data_type(name);
  if (!type) throw Error(ErrorKind::usage, "unknown element type \"" + name + "\"");
  return *type;
}

std::vector<sync::TensorSpec> specs_of(const Specs& specs) {
  std::vector<sync::TensorSpec> tensors;
  for (const auto& [name, count, type, wire] : specs) {
    tensors.push_back({name, count, type_of(type), type_of(wire)});
  }
  return tensors;
}

nb::dlpack::dtype dlpack_type(collective::DataType type) {
  const auto code = type == collective::DataType::bfloat16 ? nb::dlpack::dtype_code::Bfloat
                                                           : nb::dlpack::dtype_code::Float;
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * collective::size_of(type)), 1};
}

std::vector<std::byte> bytes_of(const nb::bytes& b) {
  const auto* begin = reinterpret_cast<const std::byte*>(b.c_str());
  return {begin, begin + b.size()};
}

nb::bytes to_bytes(std::span<const std::byte> b) {
  return nb::bytes(reinterpret_cast<const char*>(b.data()), b.size());
}

// What Python's side of a connection has in common: an object with rank, ranks, all_gather(bytes)
// and broadcast(bytes, root).
class Connection {
 public:
  explicit Connection(nb::object object)
      : object_(std::move(object)),
        rank(nb::cast<uint32_t>(object_.attr("rank"))),
        ranks(nb::cast<uint32_t>(object_.attr("ranks"))) {}
  ~Connection() {
    const nb::gil_scoped_acquire gil;
    object_.reset();
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> bytes) const {
    std::vector<std::vector<std::byte>> out;
    call([&] {
      for (nb::handle item : nb::cast<nb::list>(object_.attr("all_gather")(to_bytes(bytes)))) {
        out.push_back(bytes_of(nb::cast<nb::bytes>(item)));
      }
    });
    return out;
  }
  std::vector<std::byte> broadcast(std::span<const std::byte> bytes, uint32_t root) const {
    std::vector<std::byte> out;
    call([&] {
      out = bytes_of(nb::cast<nb::bytes>(object_.attr("broadcast")(to_bytes(bytes), root)));
    });
    return out;
  }

  // Python's exceptions become errors of the engine: its thread must not end with one of theirs.
  template <typename Function>
  void call(Function&& function) const {
    const nb::gil_scoped_acquire gil;
    try {
      function();
    } catch (nb::python_error& error) {
      throw Error(ErrorKind::peer,
                  "the ranks' connection failed: " + bindings::text_of(error.value()));
    } catch (const nb::cast_error&) {
      throw Error(ErrorKind::usage, "the ranks' connection gave something that is not bytes");
    }
  }
  // Ends this rank's calls that wait, and those of ranks that wait for it, where the connection has
  // a way to.
  void end() const noexcept {
    const nb::gil_scoped_acquire gil;
    try {
      if (nb::hasattr(object_, "end")) object_.attr("end")();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("the end of the ranks' connection");
    }
  }
  const nb::object& object() const { return object_; }

 private:
  nb::object object_;

 public:
  const uint32_t rank, ranks;
};

// Ranks of several nodes that Python connects: a connection with node (a list of ranks) and, on
// local leaders, allocate(bytes), release(address) and start(address, count, type)
// (python_leaders.h).
class PythonNetwork : public sync::Network {
 public:
  explicit PythonNetwork(nb::object object)
      : python_(std::move(object)),
        node_(nb::cast<std::vector<uint32_t>>(python_.object().attr("node"))) {}
  uint32_t rank() const override { return python_.rank; }
  uint32_t ranks() const override { return python_.ranks; }
  const std::vector<uint32_t>& node() const override { return node_; }

  void* allocate(uint64_t bytes) override {
    uintptr_t address = 0;
    python_.call([&] { address = nb::cast<uintptr_t>(python_.object().attr("allocate")(bytes)); });
    return reinterpret_cast<void*>(address);
  }
  void release(void* data) noexcept override {
    const nb::gil_scoped_acquire gil;
    try {
      python_.object().attr("release")(reinterpret_cast<uintptr_t>(data));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("the release of gradients' memory");
    }
  }
  std::unique_ptr<collective::Leaders> leaders(collective::DataType type) override {
    return std::make_unique<bindings::PythonLeaders>(python_.object(),
                                                     std::string(collective::name_of(type)));
  }
  void end() noexcept override { python_.end(); }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> bytes) override {
    return python_.all_gather(bytes);
  }
  std::vector<std::byte> broadcast(std::span<const std::byte> bytes, uint32_t root) override {
    return python_.broadcast(bytes, root);
  }

 private:
  const Connection python_;
  const std::vector<uint32_t> node_;
};

// Ranks that share no memory, as a cluster's processes that some other library connects: a
// connection with allreduce(address, count, type), all_and(bytes) and all_min(int).
class PythonCollectives : public sync::Collectives {
 public:
  explicit PythonCollectives(nb::object object) : python_(std::move(object)) {}
  uint32_t rank() const override { return python_.rank; }
  uint32_t ranks() const override { return python_.ranks; }
  void* allocate(uint64_t) override { return nullptr; }
  void release(void*) noexcept override {}
  void allreduce(void* data, uint64_t count, collective::DataType type) override {
    python_.call([&] {
      python_.object().attr("allreduce")(reinterpret_cast<uintptr_t>(data), count,
                                         std::string(collective::name_of(type)));
    });
  }
  void all_and(std::span<uint64_t> words) override {
    python_.call([&] {
      const nb::object all = python_.object().attr("all_and")(to_bytes(std::as_bytes(words)));
      const auto bytes = nb::cast<nb::bytes>(all);
      if (bytes.size() != words.size_bytes()) throw nb::cast_error();
      std::memcpy(words.data(), bytes.c_str(), bytes.size());
    });
  }
  int64_t all_min(int64_t value) override {
    python_.call([&] { value = nb::cast<int64_t>(python_.object().attr("all_min")(value)); });
    return value;
  }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> bytes) override {
    return python_.all_gather(bytes);
  }
  std::vector<std::byte> broadcast(std::span<const std::byte> bytes, uint32_t root) override {
    return python_.broadcast(bytes, root);
  }
  void start_and(std::span<uint64_t>) override {
    throw Error(ErrorKind::usage, "nonblocking agreement works between the ranks of one node only");
  }
  bool test() override { return true; }
  void end(const Error&) noexcept override { python_.end(); }
  void hang_up() noexcept override { python_.end(); }
  int64_t own_cpu_ns() const override { return 0; }

 private:
  const Connection python_;
};

// A duration in seconds.
template <std::chrono::nanoseconds sync::GradientOptions::*Field>
void bind_seconds(nb::class_<sync::GradientOptions>& options, const char* name,
                  bindings::Zero zero = bindings::Zero::allowed) {
  options.def_prop_rw(
      name,
      [](const sync::GradientOptions& o) {
        return std::chrono::duration<double>(o.*Field).count();
      },
      [name, zero](sync::GradientOptions& o, double seconds) {
        const std::string of = "the " + std::string(name) + " of gradients";
        o.*Field = bindings::nanoseconds_of(of.c_str(), seconds, zero);
      });
}

void bind_options(nb::module_& m) {
  using sync::GradientOptions;
  nb::enum_<sync::Mode>(m, "SyncMode")
      .value("planned", sync::Mode::planned)
      .value("negotiated", sync::Mode::negotiated);
  nb::class_<GradientOptions> options(m, "GradientOptions",
                                      "How gradients are reduced (native/sync/options.h).");
  options.def(nb::init<>())
      .def_rw("mode", &GradientOptions::mode)
      .def_rw("mean", &GradientOptions::mean)
      .def_rw("check_finite", &GradientOptions::check_finite)
      .def_rw("threshold", &GradientOptions::threshold_bytes)
      .def_rw("cores", &GradientOptions::cores)
      .def_rw("timeline", &GradientOptions::timeline)
      .def_rw("shapes", &GradientOptions::shapes)
      .def_rw("numbers", &GradientOptions::numbers)
      .def_rw("global_sleep_every", &GradientOptions::global_sleep_every)
      .def_rw("nonblocking", &GradientOptions::nonblocking);
  bind_seconds<&GradientOptions::warn>(options, "warn");
  bind_seconds<&GradientOptions::timeout>(options, "timeout", bindings::Zero::refused);
  bind_seconds<&GradientOptions::cycle>(options, "cycle");
  bind_seconds<&GradientOptions::test_sleep>(options, "test_sleep");
}

// Its progress thread may be in Python, for a network of Python's, when the last reference goes:
// it needs the GIL to come to an end. It must have ended before Python does (nostall.sync): a thread
// that asks for the GIL later never gets it (base/ended_threads.h).
class BoundEngine : public sync::GradientEngine {
 public:
  using GradientEngine::GradientEngine;
  ~BoundEngine() {
    const nb::gil_scoped_release unlocked;
    stop();
  }
};

std::map<std::string, int64_t> stats_of(const BoundEngine& engine) {
  const sync::GradientStats s = bindings::without_gil([&] { return engine.stats(); });
  return {{"steps", int64_t(s.steps)},
          {"reductions", int64_t(s.reductions)},
          {"tensors", int64_t(s.tensors)},
          {"bytes", int64_t(s.bytes)},
          {"cycles", int64_t(s.cycles)},
          {"empty_cycles", int64_t(s.empty_cycles)},
          {"sleep_ns", s.sleep_ns},
          {"order_ns", s.order_ns},
          {"copy_ns", s.copy_ns},
          {"submit_copy_ns", s.submit_copy_ns},
          {"reduce_ns", s.reduce_ns},
          {"latency_ns", s.latency_ns},
          {"order_wait_ns", s.order_wait_ns},
          {"reduce_wait_ns", s.reduce_wait_ns},
          {"user_ns", s.user_ns},
          {"system_ns", s.system_ns},
          {"voluntary_switches", int64_t(s.voluntary_switches)},
          {"involuntary_switches", int64_t(s.involuntary_switches)}};
}

void bind_gradients(nb::class_<BoundEngine>& engine) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  engine
      .def(
          "submit",
          [](BoundEngine& self, uint32_t tensor, uintptr_t address, bool present) {
            self.submit(tensor, reinterpret_cast<void*>(address), present);
          },
          nb::arg("tensor"), nb::arg("address"), nb::arg("present"), release,
          "The gradient's memory at `address` is read and written until wait() has returned.")
      .def(
          "submit_in_place",
          [](BoundEngine& self, uint32_t tensor, uintptr_t address, bool present) {
            auto place = bindings::without_gil([&] {
              return std::make_unique<std::shared_ptr<void>>(
                  self.submit_in_place(tensor, reinterpret_cast<const void*>(address), present));
            });
            const sync::TensorSpec& spec = self.tensors()[tensor];
            void* const data = place->get();
            return nb::ndarray<nb::pytorch, nb::ndim<1>>(data, {size_t{spec.count}},
                                                         bindings::owner_of(std::move(place)), {},
                                                         dlpack_type(spec.type));
          },
          nb::arg("tensor"), nb::arg("address"), nb::arg("present"),
          "The flat torch tensor in which the result will be after wait().")
      .def("wait", &BoundEngine::wait, release)
      .def("wait_for", &BoundEngine::wait_for, nb::arg("tensor"), release)
      .def(
          "contributors",
          [](const BoundEngine& self) {
            return bindings::array_of(bindings::without_gil([&] { return self.contributors(); }));
          },
          nb::rv_policy::automatic);
}

void bind_plans(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  m.def(
      "plan_reductions",
      [](const std::vector<std::tuple<std::vector<uint32_t>, int64_t, int64_t>>& graph,
         const Specs& tensors, uint64_t threshold) {
        std::vector<sync::GraphNode> nodes;
        nodes.reserve(graph.size());
        for (const auto& [parents, tensor, priority] : graph) {
          nodes.push_back({parents, tensor, priority});
        }
        const sync::ReductionPlan plan = sync::plan_reductions(nodes, specs_of(tensors), threshold);
        return std::tuple{plan.groups, plan.nodes, plan.edges};
      },
      nb::arg("graph"), nb::arg("tensors"), nb::arg("threshold"), release,
      "(groups, nodes, edges) of a graph of (parents, tensor or -1, priority).");
  m.def(
      "fuse_reductions",
      [](const std::vector<uint32_t>& order, const Specs& tensors, uint64_t threshold) {
        return sync::fuse(order, specs_of(tensors), threshold).groups;
      },
      nb::arg("order"), nb::arg("tensors"), nb::arg("threshold"), release);
}

}  // namespace

void bind_sync(nb::module_& m) {
  bind_options(m);
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<BoundEngine> engine(m, "GradientEngine",
                                 "Reduces gradients over all ranks (native/sync).",
                                 nb::is_weak_referenceable());
  engine
      .def(
          "__init__",
          [](BoundEngine* self, const Specs& tensors, const sync::GradientOptions& config,
             const std::string& job, uint32_t rank, uint32_t ranks, nb::object network,
             bool fixed_order) {
            const auto specs = specs_of(tensors);
            sync::NodeCollectivesConfig node;
            node.job = job;
            node.rank = rank;
            node.ranks = ranks;
            node.fixed_order = fixed_order;
            node.timeout = config.timeout;
            std::unique_ptr<sync::Network> between;
            std::unique_ptr<sync::Collectives> collectives;
            if (nb::hasattr(network, "allreduce")) {
              collectives = std::make_unique<PythonCollectives>(network);
            } else if (!network.is_none()) {
              between = std::make_unique<PythonNetwork>(network);
            }
            const nb::gil_scoped_release unlocked;
            if (!collectives) {
              collectives = between ? sync::make_two_level_collectives(node, std::move(between))
                                    : sync::make_node_collectives(node);
            }
            new (self) BoundEngine(config, std::move(collectives), specs);
          },
          nb::arg("tensors"), nb::arg("options"), nb::arg("job"), nb::arg("rank"), nb::arg("ranks"),
          nb::arg("network").none(), nb::arg("fixed_order"),
          "`rank` of `ranks`: within the node, where there is a network between nodes.")
      .def(
          "set_plan",
          [](BoundEngine& self, const Groups& groups) {
            sync::ReductionPlan plan;
            plan.groups = groups;
            self.set_plan(std::move(plan));
          },
          nb::arg("groups"), release)
      .def(
          "broadcast",
          [](BoundEngine& self, const nb::bytes& data, uint32_t root) {
            const auto in = bytes_of(data);
            const auto out = bindings::without_gil([&] { return self.broadcast(in, root); });
            return to_bytes(out);
          },
          nb::arg("data"), nb::arg("root"))
      .def(
          "all_gather",
          [](BoundEngine& self, const nb::bytes& data) {
            const auto in = bytes_of(data);
            const auto all = bindings::without_gil([&] { return self.all_gather(in); });
            nb::list out;
            for (const auto& b : all) out.append(to_bytes(b));
            return out;
          },
          nb::arg("data"))
      .def("stop", &BoundEngine::stop, release,
           "Ends the progress thread, and within a second what it waits for; no step may follow.")
      .def("stats", &stats_of)
      .def(
          "oversleeps",
          [](const BoundEngine& self) {
            const auto bins = bindings::without_gil([&] { return self.stats().oversleeps; });
            return bindings::array_of(std::vector<uint64_t>(bins.begin(), bins.end()));
          },
          nb::rv_policy::automatic,
          "How often the thread woke late: entry i counts [2^i, 2^(i+1)) microseconds.");
  bind_gradients(engine);
  bind_plans(m);
}
