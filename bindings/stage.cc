// nostall._native.Loader and its batches.
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/chrono.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
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
#include "base/random.h"
#include "dtypes.h"
#include "mixture.h"
#include "module.h"
#include "peer.h"
#include "python_source.h"
#include "python_store.h"
#include "scratch.h"
#include "stage/loader.h"
#include "stage/node.h"
#include "stage/node_reader.h"
#include "stage/record.h"
#include "text.h"

namespace nb = nanobind;
using namespace nostall;

namespace {

// Ctrl-C is looked for this often while the consumer waits.
constexpr std::chrono::milliseconds kSignalSlice{100};

using Array = nb::ndarray<nb::numpy>;

// A batch and what is needed to give its memory a shape.
class PyBatch {
 public:
  PyBatch(std::unique_ptr<stage::Batch> got, std::shared_ptr<const fields::Program> made_by)
      : batch(std::move(got)), program(std::move(made_by)), memory_(std::make_unique<Memory>()) {
    const MutexLock lock(memory_->mutex);
    memory_->buffer = batch->buffer;
    memory_->tail = batch->tail;
    batch->buffer.reset();
    batch->tail.reset();
  }

  // While arrays are made of them in one thread, another one may release() the batch.
  std::shared_ptr<stage::Buffer> buffer() const {
    const MutexLock lock(memory_->mutex);
    return memory_->buffer;
  }
  std::shared_ptr<stage::Buffer> tail() const {
    const MutexLock lock(memory_->mutex);
    return memory_->tail;
  }
  void release() {
    // Dropped without the lock, as memory of Python's may run code that comes back here, and without
    // the GIL, as the system takes its time.
    std::shared_ptr<stage::Buffer> buffer, tail;
    {
      const MutexLock lock(memory_->mutex);
      buffer.swap(memory_->buffer);
      tail.swap(memory_->tail);
    }
    const nb::gil_scoped_release release;
    buffer.reset();
    tail.reset();
  }

  // Without its memory.
  std::unique_ptr<stage::Batch> batch;
  std::shared_ptr<const fields::Program> program;  // null: raw bytes

 private:
  struct Memory {
    Mutex mutex;
    std::shared_ptr<stage::Buffer> buffer NOSTALL_GUARDED_BY(mutex);
    std::shared_ptr<stage::Buffer> tail NOSTALL_GUARDED_BY(mutex);
  };
  std::unique_ptr<Memory> memory_;
};

Error released() {
  return {ErrorKind::usage, "the memory of this batch was given back by release()"};
}

// An array over `offset` of the buffer. It owns the buffer, which returns to the pool when the last
// tensor on it dies.
Array view_of(const std::shared_ptr<stage::Buffer>& buffer, uint64_t offset,
              std::span<const int64_t> shape, nb::dlpack::dtype type) {
  const nb::capsule owner =
      bindings::owner_of(std::make_unique<std::shared_ptr<stage::Buffer>>(buffer));
  std::vector<size_t> sides(shape.begin(), shape.end());
  if (!buffer && std::ranges::find(sides, size_t{0}) == sides.end()) throw released();
  void* data = buffer ? buffer->data() + offset : nullptr;
  return Array(data, sides.size(), sides.data(), owner, nullptr, type);
}

Array data_of(const PyBatch& b) {
  const auto bytes = static_cast<int64_t>(b.batch->bytes);
  return view_of(b.buffer(), 0, {&bytes, 1}, nb::dtype<uint8_t>());
}

// Values of a field. NumPy's name of the type of 8 bytes is that of `unsigned long long` at first, of
// which torch makes no tensor.
nb::object values_of(const std::shared_ptr<stage::Buffer>& buffer, uint64_t offset,
                     std::span<const int64_t> shape, fields::Type type) {
  nb::object array = nb::cast(view_of(buffer, offset, shape, bindings::dtype_of(type)));
  return type == fields::Type::uint64 ? array.attr("view")("u8") : array;
}

// One output: an array, or (values, offsets or lengths[, shapes]) if it is ragged.
nb::object output_of(const PyBatch& b, size_t number) {
  if (!b.program || number >= b.program->outputs().size()) throw nb::index_error();
  const fields::Output& output = b.program->outputs()[number];
  const size_t n = b.batch->samples.size();
  if (output.form == fields::Form::dense) {
    std::vector<int64_t> shape{static_cast<int64_t>(n)};
    shape.insert(shape.end(), output.shape.begin(), output.shape.end());
    return values_of(b.buffer(), b.program->region(number, n), shape, output.type);
  }
  const fields::Laid& laid = b.batch->laid[b.program->ragged_before(number)];
  const auto tail = b.tail();
  const nb::object values = values_of(tail, laid.values, laid.shape, output.type);
  const nb::object counts =
      nb::cast(view_of(tail, laid.counts, laid.counts_shape, nb::dtype<int64_t>()));
  if (output.form == fields::Form::padded || output.by_rows()) {
    return nb::make_tuple(values, counts);
  }
  const std::array<int64_t, 2> shapes{static_cast<int64_t>(n),
                                      static_cast<int64_t>(output.shape.size())};
  return nb::make_tuple(values, counts,
                        nb::cast(view_of(tail, laid.shapes, shapes, nb::dtype<int64_t>())));
}

Array labels_of(const PyBatch& b) {
  if (!b.batch->labels_at) return Array(bindings::array_of(b.batch->labels));
  const auto n = static_cast<int64_t>(b.batch->labels.size());
  return view_of(b.buffer(), *b.batch->labels_at, {&n, 1}, nb::dtype<int64_t>());
}

// The texts of a ragged output of bytes that are UTF-8.
nb::list texts_of(const PyBatch& b, size_t number) {
  if (!b.program || number >= b.program->outputs().size()) throw nb::index_error();
  const fields::Laid& laid = b.batch->laid.at(b.program->ragged_before(number));
  const auto tail = b.tail();
  if (!tail) throw released();
  const auto* text = reinterpret_cast<const char*>(tail->data() + laid.values);
  const auto* offsets = reinterpret_cast<const int64_t*>(tail->data() + laid.counts);
  nb::list out;
  for (size_t i = 0; i < b.batch->samples.size(); ++i) {
    out.append(nb::str(text + offsets[i], static_cast<size_t>(offsets[i + 1] - offsets[i])));
  }
  return out;
}

// Threads of the loader may be about to log, which takes the GIL: never join them while holding it.
// A stage::Loader is for one thread at a time, but Python's threads may all call: one after the
// other, and a close ends a wait in another thread.
class PyLoader {
 public:
  explicit PyLoader(std::unique_ptr<stage::Loader> loader)
      : loader_(std::move(loader)), peers_(loader_->config().peers), owner_pid_(::getpid()) {}
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
  // Never waits.
  bool ready() const {
    if (!mutex_.try_lock()) return false;
    const bool there = loader_->ready();
    mutex_.unlock();
    return there;
  }
  // Does not wait for other calls. Empty without peers, and once it is closed.
  std::map<std::string, uint64_t> peer_counts() const {
    const nb::gil_scoped_release release;
    std::map<std::string, uint64_t> out;
    if (::getpid() != owner_pid_) return out;
    const auto peers = peers_.lock();
    if (!peers) return out;
    const peer::ExchangeStats s = peers->stats();
    out["nodes"] = peers->nodes();
    out["nodes_alive"] = peers->nodes_alive();
    for (const auto& [name, counter] : peer::counters_of_exchange<uint64_t>())
      out[name] = s.*counter;
    out["copies_planned"] = loader_->copies().planned;
    out["copies_found"] = loader_->copies().found;
    return out;
  }
  void close() const {
    closing_ = true;
    with([](stage::Loader& loader) { loader.close(); });
  }

 private:
  std::unique_ptr<stage::Loader> loader_;
  const std::weak_ptr<peer::Exchange> peers_;  // until it is closed
  mutable Mutex mutex_;                        // held by calls of *loader_
  mutable std::atomic<bool> closing_{false};
  const int owner_pid_;
};

PyBatch next(const PyLoader& self) {
  for (;;) {
    std::unique_ptr<stage::Batch> batch = self.next();
    if (batch) {
      return PyBatch(std::move(batch), self.config().program);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

std::optional<PyBatch> batch_of(const PyLoader& self, std::unique_ptr<stage::Batch> batch) {
  if (!batch) return std::nullopt;
  return PyBatch(std::move(batch), self.config().program);
}

std::optional<PyBatch> next_soon(const PyLoader& self) { return batch_of(self, self.next()); }

std::optional<PyBatch> next_if_ready(const PyLoader& self) {
  // To give up the GIL may cost milliseconds where callables run.
  if (!self.ready()) return std::nullopt;
  return batch_of(self, self.next());
}

std::string string_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// With it goes what may be the last hold on tiers of other readers: to leave them waits for other
// processes, and for a thread that may be about to log.
struct PyLoaderConfig : stage::LoaderConfig {
  PyLoaderConfig() = default;
  ~PyLoaderConfig() { hold(nullptr); }
  PyLoaderConfig(const PyLoaderConfig&) = delete;
  PyLoaderConfig& operator=(const PyLoaderConfig&) = delete;

  void hold(std::shared_ptr<tier::NodeCache> other) {
    cache.swap(other);
    const nb::gil_scoped_release release;
    other.reset();
  }
};

void bind_loader_config(nb::module_& m) {
  using LoaderConfig = PyLoaderConfig;
  nb::class_<LoaderConfig>(m, "LoaderConfig", "What a loader does (native/stage/loader.h).")
      .def(nb::init<>())
      .def_rw("job", &LoaderConfig::job)
      .def_rw("rank", &LoaderConfig::rank)
      .def_rw("source", &LoaderConfig::source)
      .def_rw("program", &LoaderConfig::program, nb::for_setter(nb::arg("program").none()))
      .def_rw("sharing", &LoaderConfig::sharing)
      .def_rw("copies", &LoaderConfig::copies)
      .def_rw("locality", &LoaderConfig::locality)
      .def_prop_rw(
          "begin", [](const LoaderConfig& c) { return std::pair(c.begin.epoch, c.begin.batch); },
          [](LoaderConfig& c, std::pair<uint32_t, uint64_t> at) {
            c.begin = {at.first, at.second};
          },
          "Epoch and batch that the placement begins with.")
      .def_rw("on_error", &LoaderConfig::on_error)
      .def_rw("fetchers", &LoaderConfig::fetchers)
      .def_rw("workers", &LoaderConfig::workers)
      .def_rw("depth", &LoaderConfig::depth)
      .def_rw("reader", &LoaderConfig::reader)
      .def_rw("expected_tiers", &LoaderConfig::expected_tiers)
      .def_rw("expected_peer", &LoaderConfig::expected_peer)
      .def_rw("expected_source", &LoaderConfig::expected_source)
      .def_rw("staging_bytes", &LoaderConfig::staging_bytes)
      .def_rw("io_bytes", &LoaderConfig::io_bytes)
      .def_rw("keep_bytes", &LoaderConfig::keep_bytes)
      .def_rw("labels_in_slab", &LoaderConfig::labels_in_slab)
      .def(
          "share",
          [](LoaderConfig& c, const stage::NodeReader& tiers, const bindings::Ids& numbers) {
            c.hold(tiers.share({numbers.data(), numbers.data() + numbers.size()}));
          },
          nb::arg("tiers"), nb::arg("numbers"),
          "Takes the tiers that others share; sample s is their sample numbers[s], or s without "
          "any.")
      .def(
          "take_batch_memory",
          [](LoaderConfig& c, nb::callable take) {
            c.batch_memory = bindings::python_memory(std::move(take));
          },
          nb::arg("take"),
          "`take` gives the memory of batches: (bytes) -> a uint8 array of so many. It is called "
          "from the stage's threads.");
}

void bind_nodes(nb::module_& m) {
  nb::class_<tier::TierSpec>(m, "TierSpec", "A storage class of a node.")
      .def(nb::init<tier::TierKind, uint64_t, std::string, bool, bool>(), nb::arg("kind"),
           nb::arg("capacity"), nb::arg("path"), nb::arg("keep"), nb::arg("modest"))
      .def_rw("readers", &tier::TierSpec::readers)
      .def(
          "use_store",
          [](tier::TierSpec& s, nb::object tier) {
            s.store = bindings::python_store(std::move(tier));
          },
          nb::arg("tier"),
          "`tier` keeps the records: put(key, bytes), and get(key) -> bytes or None.");
  nb::class_<plan::Nodes>(m, "Nodes", "The node of each rank, and what each node keeps.")
      .def(nb::init<>())
      .def_rw("of_rank", &plan::Nodes::of_rank)
      .def_rw("capacity", &plan::Nodes::capacity);
  using stage::NodeSpec;
  nb::class_<NodeSpec>(m, "NodeSpec", "A rank's node and its tiers (native/stage/node.h).")
      .def(nb::init<>())
      .def_rw("job", &NodeSpec::job)
      .def_rw("local_rank", &NodeSpec::local_rank)
      .def_rw("local_world", &NodeSpec::local_world)
      .def_rw("loads", &NodeSpec::loads)
      .def_rw("tiers", &NodeSpec::tiers)
      .def_rw("node", &NodeSpec::node)
      .def_rw("nodes", &NodeSpec::nodes)
      .def_rw("all_tiers", &NodeSpec::all_tiers);
  using peer::ExchangeConfig;
  nb::class_<ExchangeConfig>(m, "ExchangeConfig", "How nodes are reached (native/peer/exchange.h).")
      .def(nb::init<>())
      .def_prop_rw(
          "addresses",
          [](const ExchangeConfig& c) {
            std::vector<nb::bytes> out;
            for (const std::string& a : c.addresses) out.emplace_back(a.data(), a.size());
            return out;
          },
          [](ExchangeConfig& c, const std::vector<nb::bytes>& addresses) {
            c.addresses.clear();
            for (const nb::bytes& a : addresses) c.addresses.push_back(string_of(a));
          })
      .def_prop_rw(
          "secret",
          [](const ExchangeConfig& c) { return nb::bytes(c.secret.data(), c.secret.size()); },
          [](ExchangeConfig& c, const nb::bytes& secret) { c.secret = string_of(secret); })
      .def_rw("timeout", &ExchangeConfig::timeout);
}

void bind_configs(nb::module_& m) {
  nb::enum_<stage::OnError>(m, "OnError")
      .value("raise_", stage::OnError::raise)
      .value("substitute", stage::OnError::substitute)
      .value("report", stage::OnError::report);
  nb::enum_<stage::Sharing>(m, "Sharing")
      .value("push", stage::Sharing::push)
      .value("owners_read", stage::Sharing::owners_read)
      .value("hdmlp", stage::Sharing::hdmlp);
  nb::enum_<source::ReaderKind>(m, "ReaderKind")
      .value("auto", source::ReaderKind::automatic)
      .value("pread", source::ReaderKind::pread)
      .value("io_uring", source::ReaderKind::uring);
  nb::enum_<tier::TierKind>(m, "TierKind")
      .value("ram", tier::TierKind::ram)
      .value("file", tier::TierKind::file);

  bind_loader_config(m);
  bind_nodes(m);
}

void bind_batch(nb::module_& m) {
  nb::class_<PyBatch>(m, "Batch", "One local batch, as the stage hands it out.")
      .def_prop_ro("epoch", [](const PyBatch& b) { return b.batch->position.epoch; })
      .def_prop_ro("index", [](const PyBatch& b) { return b.batch->position.batch; })
      .def("__len__", [](const PyBatch& b) { return b.batch->samples.size(); })
      .def_prop_ro("data", &data_of, nb::rv_policy::automatic, "Raw bytes (total,).")
      .def("output", &output_of, nb::arg("number"),
           nb::sig("def output(self, number: int) -> typing.Any"),
           "One output of the program: an array, or if it is ragged (values, offsets or lengths), "
           "and "
           "the shapes where more than the first dimension differs.")
      .def_prop_ro(
          "place",
          [](const PyBatch& b) {
            const auto buffer = b.buffer();
            const auto address = reinterpret_cast<uintptr_t>(buffer ? buffer->data() : nullptr);
            return std::make_tuple(address, b.batch->samples.size());
          },
          "The address of the arrays of the program, and the samples in them: the same pair, the "
          "same "
          "places.")
      .def_prop_ro(
          "mixture", [](const PyBatch& b) { return bindings::tuple_of(b.batch->mixture); },
          "What the batch got: none, mixup or cutmix; how much of each sample is its own; the box "
          "(x, "
          "y, width, height).")
      .def("texts", &texts_of, nb::arg("number"),
           nb::sig("def texts(self, number: int) -> list[str]"), "The same of texts, as a list.")
      .def_prop_ro("labels", &labels_of, nb::rv_policy::automatic,
                   "Their own memory, or with labels_in_slab that of the batch.")
      .def_prop_ro(
          "samples", [](const PyBatch& b) { return bindings::array_of(b.batch->samples); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "occurrences", [](const PyBatch& b) { return bindings::array_of(b.batch->occurrences); },
          nb::rv_policy::automatic,
          "How often the epoch had each sample before; empty where none comes again.")
      .def_prop_ro(
          "offsets", [](const PyBatch& b) { return bindings::array_of(b.batch->offsets); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "lengths", [](const PyBatch& b) { return bindings::array_of(b.batch->lengths); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "failures",
          [](const PyBatch& b) {
            std::vector<std::tuple<uint64_t, std::string>> out;
            for (const auto& f : b.batch->failures) out.emplace_back(f.place, f.reason);
            return out;
          },
          "(place, reason) of samples that on_error=\"report\" left empty.")
      .def_prop_ro("queue", [](const PyBatch& b) { return b.batch->queue; })
      .def("release", &PyBatch::release,
           "Gives the memory back, once no array is over it; its outputs are then gone. From any "
           "thread.");
}

void bind_loader(nb::module_& m) {
  nb::class_<PyLoader>(m, "Loader", "The staging buffer of one rank (native/stage/loader.h).")
      .def(
          "__init__",
          [](PyLoader* self, const PyLoaderConfig& config, stage::NodeSpec& node,
             const peer::ExchangeConfig& peers, bindings::PyTransport* transport) {
            node.waiting = bindings::look_at_signals;
            // Made there too: a loader that fails leaves the tiers.
            new (self) PyLoader(bindings::without_gil([&] {
              stage::LoaderConfig attached =
                  stage::attach(config, node, peers, transport ? transport->take() : nullptr);
              attached.while_starting = [](const std::function<void()>& start) {
                const nb::gil_scoped_acquire gil;  // Python changes the environment with it
                start();
              };
              return std::make_unique<stage::Loader>(std::move(attached));
            }));
          },
          nb::arg("config"), nb::arg("node"), nb::arg("peers"), nb::arg("transport").none(),
          "`transport` is None where samples do not travel between nodes.")
      .def("next", &next, "The next batch; waits for it with the GIL released.")
      .def("next_soon", &next_soon, "The same, or None after a tenth of a second.")
      .def("next_if_ready", &next_if_ready, "The same, or None at once.")
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
      .def(
          "forget_sum",
          [](const PyLoader& l, uint64_t sample) {
            l.with([&](stage::Loader& loader) { loader.forget_sum(sample); });
          },
          nb::arg("sample"), "The sample cannot be decoded: its checksum is not kept.")
      .def("close", &PyLoader::close)
      .def_prop_ro("peers", &PyLoader::peer_counts,
                   "What was exchanged with other nodes (native/peer/exchange.h); {} on one node.");
}

}  // namespace

void bind_unpack_one(nb::module_& m) {
  m.def(
      "unpack_one",
      [](const source::Source& source, std::shared_ptr<const fields::Program> program,
         const nb::bytes& record, uint64_t sample, uint64_t seed, uint32_t epoch,
         uint32_t occurrence) {
        if (sample >= source.size()) throw nb::index_error();
        const auto* begin = reinterpret_cast<const std::byte*>(record.c_str());
        const image::SampleKey key{seed_of_occurrence(seed, occurrence), epoch, sample};
        const std::span bytes(begin, record.size());
        const bindings::Lent<fields::Scratch> scratch;
        auto batch = bindings::without_gil(
            [&] { return stage::unpack_one(source, *program, bytes, key, scratch.get()); });
        return PyBatch(std::move(batch), program);
      },
      nb::arg("source"), nb::arg("program"), nb::arg("record"), nb::arg("sample"), nb::kw_only(),
      nb::arg("seed"), nb::arg("epoch"), nb::arg("occurrence"),
      "The batch of one sample, from its record.");
}

void bind_record(nb::module_& m) {
  using stage::Record;
  nb::class_<Record>(m, "Record", "What a consumer was handed (native/stage/record.h).")
      .def(nb::init<size_t>(), nb::arg("kept"))
      .def("begin", &Record::begin, nb::arg("epoch"), "Begins the sums of an epoch.")
      .def(
          "add",
          [](Record& r, const PyBatch& b, double time, double wait) {
            r.add(*b.batch, time, wait);
          },
          nb::arg("batch"), nb::arg("time"), nb::arg("wait"))
      .def("substitute", &Record::substitute, nb::arg("sample"))
      .def_prop_ro(
          "taken",
          [](const Record& r) {
            const stage::Taken& t = r.taken();
            std::vector<std::tuple<uint64_t, uint64_t, double>> origins;
            for (const auto& o : t.origins) {
              origins.emplace_back(o.samples, o.bytes, static_cast<double>(o.nanoseconds) * 1e-9);
            }
            return std::make_tuple(t.epoch, t.batches, t.samples, t.stall,
                                   static_cast<double>(t.transform_ns) * 1e-9, origins,
                                   t.substituted);
          },
          "Of the epoch: its number, batches, samples, seconds of waiting and of decoding; "
          "(samples, "
          "bytes, seconds) of the RAM tier, the file tier, other nodes and the source; "
          "substituted.")
      .def_prop_ro(
          "most",
          [](const Record& r) {
            const stage::Memory& most = r.most();
            return std::make_tuple(most.ram_tier, most.file_tier, most.staging, most.io_buffers,
                                   most.decoding);
          },
          "The most bytes by pool.")
      .def_prop_ro("columns", &Record::columns, "Of the last batches.");
}

void bind_stage(nb::module_& m) {
  bind_configs(m);
  bind_batch(m);
  bind_unpack_one(m);
  bind_record(m);
  bind_loader(m);
}
