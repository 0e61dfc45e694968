// nostall._native.Loader and its batches.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <tuple>

#include "arrays.h"
#include "base/mutex.h"
#include "module.h"
#include "peer.h"
#include "stage/loader.h"
#include "stage/node.h"

namespace nb = nanobind;
using namespace nostall;

namespace {

// Ctrl-C is looked for this often while the consumer waits.
constexpr std::chrono::milliseconds kSignalSlice{100};

using Array = nb::ndarray<nb::numpy>;

nb::dlpack::dtype dtype_of(image::Type type) {
  switch (type) {
    case image::Type::float16:
      return {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    case image::Type::float32:
      return nb::dtype<float>();
    case image::Type::uint8:
      break;
  }
  return nb::dtype<uint8_t>();
}

// A batch and what is needed to give its memory a shape.
struct PyBatch {
  std::unique_ptr<stage::Batch> batch;
  std::optional<image::Output> output;
};

Array data_of(const PyBatch& b) {
  // The array owns the buffer: it returns to the pool when the last tensor on it dies.
  nb::capsule owner =
      bindings::owner_of(std::make_unique<std::shared_ptr<stage::Buffer>>(b.batch->buffer));
  void* data = b.batch->buffer ? b.batch->buffer->data() : nullptr;
  if (!b.output) {
    const std::array<size_t, 1> shape{b.batch->bytes};
    return Array(data, 1, shape.data(), owner, nullptr, nb::dtype<uint8_t>());
  }
  const image::Output& o = *b.output;
  const size_t n = b.batch->samples.size();
  const std::array<size_t, 4> shape = o.layout == image::Layout::chw
                                          ? std::array<size_t, 4>{n, 3, o.height, o.width}
                                          : std::array<size_t, 4>{n, o.height, o.width, 3};
  return Array(data, 4, shape.data(), owner, nullptr, dtype_of(o.type));
}

// Threads of the loader may be about to log, which takes the GIL: never join them while holding it.
// A stage::Loader is for one thread at a time, but Python's threads may all call: one after the
// other, and a close ends a wait in another thread.
class PyLoader {
 public:
  explicit PyLoader(stage::LoaderConfig config)
      : loader_(std::make_unique<stage::Loader>(std::move(config))), owner_pid_(::getpid()) {}
  ~PyLoader() {
    const nb::gil_scoped_release release;
    loader_.reset();
  }
  PyLoader(const PyLoader&) = delete;
  PyLoader& operator=(const PyLoader&) = delete;

  const stage::LoaderConfig& config() const { return loader_->config(); }

  // Calls function(loader) without the GIL.
  template <typename Function>
  auto with(Function&& function) const NOSTALL_UNCHECKED {
    const nb::gil_scoped_release release;
    // In a forked child another thread's lock is held for ever, and the loader refuses by itself.
    std::optional<MutexLock> lock;
    if (::getpid() == owner_pid_) lock.emplace(mutex_);
    return function(*loader_);
  }
  std::unique_ptr<stage::Batch> next() const {
    if (closing_) throw Error(ErrorKind::stopped, "the loader is closed");
    return with([](stage::Loader& loader) { return loader.next(kSignalSlice); });
  }
  void close() const {
    closing_ = true;
    with([](stage::Loader& loader) { loader.close(); });
  }

 private:
  std::unique_ptr<stage::Loader> loader_;
  mutable Mutex mutex_;  // held by calls of *loader_
  mutable std::atomic<bool> closing_{false};
  const int owner_pid_;
};

PyBatch next(const PyLoader& self) {
  for (;;) {
    std::unique_ptr<stage::Batch> batch = self.next();
    if (batch) {
      PyBatch result{std::move(batch), std::nullopt};
      if (self.config().pipeline) result.output = self.config().pipeline->output();
      return result;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

std::map<std::string, uint64_t> peer_counts(stage::Loader& loader) {
  std::map<std::string, uint64_t> out;
  const auto& peers = loader.config().peers;
  if (!peers) return out;
  const peer::ExchangeStats s = peers->stats();
  out["nodes"] = peers->nodes();
  out["nodes_alive"] = peers->nodes_alive();
  out["fetched"] = s.fetched;
  out["fetched_bytes"] = s.fetched_bytes;
  out["fetch_nanoseconds"] = s.fetch_nanoseconds;
  out["asked_too_early"] = s.asked_too_early;
  out["asked_in_vain"] = s.asked_in_vain;
  out["pushed"] = s.pushed;
  out["pushed_bytes"] = s.pushed_bytes;
  out["pushes_given_up"] = s.pushes_given_up;
  out["served"] = s.served;
  out["served_bytes"] = s.served_bytes;
  out["received"] = s.received;
  out["received_bytes"] = s.received_bytes;
  out["redundant"] = s.redundant;
  out["refused"] = s.refused;
  out["dropped_ranks"] = s.dropped_ranks;
  out["returned_ranks"] = s.returned_ranks;
  out["thread_nanoseconds"] = s.thread_nanoseconds;
  return out;
}

source::ReaderKind reader_kind(const std::string& name) {
  if (name == "auto") return source::ReaderKind::automatic;
  if (name == "pread") return source::ReaderKind::pread;
  if (name == "io_uring") return source::ReaderKind::uring;
  throw Error(ErrorKind::usage, "reader must be 'auto', 'pread' or 'io_uring', not '" + name + "'");
}

stage::OnError on_error_of(const std::string& name) {
  if (name == "raise") return stage::OnError::raise;
  if (name == "substitute") return stage::OnError::substitute;
  if (name == "report") return stage::OnError::report;
  throw Error(ErrorKind::usage, "on_error must be 'raise' or 'substitute', not '" + name + "'");
}

stage::Sharing sharing_of(const std::string& name) {
  if (name == "push") return stage::Sharing::push;
  if (name == "owners-read") return stage::Sharing::owners_read;
  throw Error(ErrorKind::usage, "sharing must be 'push' or 'owners-read', not '" + name + "'");
}

using TierTuple =
    std::tuple<std::string, uint64_t, std::string, bool, bool>;  // TierSpec of nostall/sizes.py

std::vector<tier::TierSpec> tiers_of(const std::vector<TierTuple>& tuples) {
  std::vector<tier::TierSpec> tiers;
  for (const auto& [kind, capacity, path, keep, modest] : tuples) {
    if (kind != "ram" && kind != "file") {
      throw Error(ErrorKind::usage, "a tier is 'ram' or 'file', not '" + kind + "'");
    }
    tiers.push_back(
        {kind == "ram" ? tier::TierKind::ram : tier::TierKind::file, capacity, path, keep, modest});
  }
  return tiers;
}

}  // namespace

void bind_stage(nb::module_& m) {
  nb::class_<PyBatch>(m, "Batch", "One local batch, as the stage hands it out.")
      .def_prop_ro("epoch", [](const PyBatch& b) { return b.batch->position.epoch; })
      .def_prop_ro("index", [](const PyBatch& b) { return b.batch->position.batch; })
      .def("__len__", [](const PyBatch& b) { return b.batch->samples.size(); })
      .def_prop_ro("data", &data_of, nb::rv_policy::automatic,
                   "Images (n, 3, height, width) or (n, height, width, 3), or raw bytes (total,).")
      .def_prop_ro(
          "labels", [](const PyBatch& b) { return bindings::array_of(b.batch->labels); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "samples", [](const PyBatch& b) { return bindings::array_of(b.batch->samples); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "offsets", [](const PyBatch& b) { return bindings::array_of(b.batch->offsets); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "lengths", [](const PyBatch& b) { return bindings::array_of(b.batch->lengths); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "origins",
          [](const PyBatch& b) {
            std::vector<std::tuple<uint64_t, uint64_t, double>> out;
            for (const auto& o : b.batch->origins) {
              out.emplace_back(o.samples, o.bytes, static_cast<double>(o.nanoseconds) * 1e-9);
            }
            return out;
          },
          "(samples, bytes, seconds) of the RAM tier, the file tier, other nodes and the source.")
      .def_prop_ro(
          "transform_seconds",
          [](const PyBatch& b) { return static_cast<double>(b.batch->transform_ns) * 1e-9; })
      .def_prop_ro("substitutions",
                   [](const PyBatch& b) {
                     std::vector<std::tuple<uint64_t, uint64_t, std::string>> out;
                     for (const auto& s : b.batch->substitutions) {
                       out.emplace_back(s.sample, s.replacement, s.reason);
                     }
                     return out;
                   })
      .def_prop_ro(
          "failures",
          [](const PyBatch& b) {
            std::vector<std::tuple<uint64_t, std::string>> out;
            for (const auto& f : b.batch->failures) out.emplace_back(f.place, f.reason);
            return out;
          },
          "(place, reason) of samples that on_error=\"report\" left empty.")
      .def_prop_ro("queue", [](const PyBatch& b) { return b.batch->queue; });

  nb::class_<PyLoader>(m, "Loader", "The staging buffer of one rank (native/stage/loader.h).")
      .def(
          "__init__",
          [](PyLoader* self, const plan::JobSpec& job, uint32_t rank,
             std::shared_ptr<source::Source> source, std::shared_ptr<image::Pipeline> pipeline,
             const std::vector<TierTuple>& tiers, const std::string& job_name, uint32_t local_rank,
             uint32_t local_world, const std::string& on_error, uint32_t fetchers, uint32_t workers,
             uint32_t depth, const std::string& reader, uint64_t staging_bytes, uint64_t io_bytes,
             uint32_t first_epoch, bindings::PyTransport* transport, uint32_t node,
             const std::vector<uint32_t>& node_of_rank, const std::vector<uint64_t>& capacities,
             const std::vector<nb::bytes>& addresses, const nb::bytes& secret,
             uint32_t peer_timeout_ms, const std::string& sharing, bool locality,
             const std::vector<double>& expected) {
            stage::LoaderConfig config;
            config.job = job;
            config.rank = rank;
            config.source = std::move(source);
            config.pipeline = std::move(pipeline);
            config.on_error = on_error_of(on_error);
            config.sharing = sharing_of(sharing);
            config.locality = locality;
            if (!expected.empty() && expected.size() != stage::kOrigins) {
              throw Error(ErrorKind::usage, "a speed is expected of each origin, or of none");
            }
            std::copy(expected.begin(), expected.end(), config.expected.begin());
            config.first_epoch = first_epoch;
            config.local_rank = local_rank;
            config.local_world = local_world;
            config.fetchers = fetchers;
            config.workers = workers;
            config.depth = depth;
            config.reader = reader_kind(reader);
            config.staging_bytes = staging_bytes;
            config.io_bytes = io_bytes;
            const stage::NodeSpec spec{job_name,        local_rank, local_world,
                                       tiers_of(tiers), node,       {node_of_rank, capacities}};
            peer::ExchangeConfig peers;
            peers.rank = rank;
            peers.node_of_rank = node_of_rank;
            for (const nb::bytes& a : addresses) peers.addresses.emplace_back(a.c_str(), a.size());
            peers.secret = {secret.c_str(), secret.size()};
            peers.timeout = std::chrono::milliseconds(peer_timeout_ms);
            peers.epoch_length = std::max<uint64_t>(1, plan::epoch_length(job));
            {
              const nb::gil_scoped_release release;
              stage::NodeTiers tiers_here =
                  stage::attach_node_cache(job, rank, *config.source, spec, first_epoch);
              config.cache = tiers_here.cache;
              if (transport && config.cache) {
                peers.plan = tiers_here.plan;
                config.peers = std::make_shared<peer::Exchange>(
                    transport->take(), std::move(peers), std::move(tiers_here.ownership),
                    config.source->sizes(), config.cache);
              }
            }
            new (self) PyLoader(std::move(config));
          },
          nb::kw_only(), nb::arg("job"), nb::arg("rank"), nb::arg("source"),
          nb::arg("pipeline").none(), nb::arg("tiers"), nb::arg("job_name"), nb::arg("local_rank"),
          nb::arg("local_world"), nb::arg("on_error"), nb::arg("fetchers"), nb::arg("workers"),
          nb::arg("depth"), nb::arg("reader"), nb::arg("staging_bytes"), nb::arg("io_bytes"),
          nb::arg("first_epoch") = 0, nb::arg("transport").none() = nb::none(), nb::arg("node") = 0,
          nb::arg("node_of_rank") = std::vector<uint32_t>(),
          nb::arg("capacities") = std::vector<uint64_t>(),
          nb::arg("addresses") = std::vector<nb::bytes>(), nb::arg("secret") = nb::bytes("", 0),
          nb::arg("peer_timeout_ms") = 10000, nb::arg("sharing") = "push",
          nb::arg("locality") = false, nb::arg("expected") = std::vector<double>())
      .def("next", &next, "The next batch; waits for it with the GIL released.")
      .def(
          "seek",
          [](const PyLoader& l, uint32_t epoch, uint64_t batch) {
            l.with([&](stage::Loader& loader) { loader.seek({epoch, batch}); });
          },
          nb::arg("epoch"), nb::arg("batch"))
      .def_prop_ro("position",
                   [](const PyLoader& l) {
                     const stage::Position position =
                         l.with([](stage::Loader& loader) { return loader.position(); });
                     return std::make_tuple(position.epoch, position.batch);
                   })
      .def("close", &PyLoader::close)
      .def_prop_ro(
          "peers",
          [](const PyLoader& l) {
            return l.with([](stage::Loader& loader) { return peer_counts(loader); });
          },
          "What was exchanged with other nodes (native/peer/exchange.h); {} on one node.")
      .def_prop_ro("memory", [](const PyLoader& l) {
        return l.with([](stage::Loader& loader) {
          const stage::Memory memory = loader.memory();
          const auto& cache = loader.config().cache;
          return std::make_tuple(cache ? cache->ram_bytes() : 0, cache ? cache->file_bytes() : 0,
                                 memory.staging, memory.io_buffers, memory.decoding);
        });
      });
}
