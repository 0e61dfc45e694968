// Collectives on raw addresses: the Python side checks arrays and tensors and passes where they
// are.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "arrays.h"
#include "base/error.h"
#include "base/mutex.h"
#include "collective/communicator.h"
#include "collective/selection.h"
#include "module.h"
#include "python_leaders.h"
#include "seconds.h"
#include "text.h"
#include "trace/trace.h"

namespace nb = nanobind;
using namespace nostall;
using namespace nostall::collective;

namespace {

template <typename T>
T named(std::optional<T> found, const char* what, const std::string& name) {
  if (found) return *found;
  throw Error(ErrorKind::usage, "there is no " + std::string(what) + " \"" + name + "\"");
}

// A Python function as an operation. What it raises is kept and raised when the call returns; a
// collective cannot end in the middle.
class UserOperation {
 public:
  explicit UserOperation(nb::object function) : function_(std::move(function)) {}
  static void call(const void* in, void* inout, uint64_t count, void* self) {
    static_cast<UserOperation*>(self)->combine(in, inout, count);
  }
  void raise() {
    std::exception_ptr error;
    {
      const MutexLock lock(mutex_);
      std::swap(error, error_);
    }
    if (error) std::rethrow_exception(error);
  }
  uint64_t element_bytes = 1;

 private:
  void combine(const void* in, void* inout, uint64_t count) {
    const nb::gil_scoped_acquire gil;
    try {
      const size_t bytes = count * element_bytes;
      using View = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;
      // The operand is not written: the wrapper in Python makes its view read-only.
      function_(View(const_cast<void*>(in), {bytes}, nb::none()).cast(nb::rv_policy::reference),
                View(inout, {bytes}, nb::none()).cast(nb::rv_policy::reference));
    } catch (...) {
      const MutexLock lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }
  nb::object function_;
  Mutex mutex_;  // calls of several threads may use one operation
  std::exception_ptr error_ NOSTALL_GUARDED_BY(mutex_);
};

class PyReducer {
 public:
  PyReducer(const std::string& op, const std::string& type)
      : reducer_(named(find_op(op), "operation", op),
                 named(find_data_type(type), "element type", type)) {}
  PyReducer(nb::object function, uint64_t element_bytes, bool commutative)
      : user_(std::make_shared<UserOperation>(std::move(function))),
        reducer_(UserOperation::call, user_.get(), element_bytes, commutative) {
    user_->element_bytes = element_bytes;
  }
  const Reducer& get() const { return reducer_; }
  // With the GIL.
  void raise() const {
    if (user_) user_->raise();
  }

 private:
  std::shared_ptr<UserOperation> user_;
  Reducer reducer_;
};

constexpr uint32_t kMostParts = 1024;

const void* address(uintptr_t value) { return reinterpret_cast<const void*>(value); }
void* writable(uintptr_t value) { return reinterpret_cast<void*>(value); }

// What NumPy's __array_struct__ holds. Its flags are none of a structured array's.
struct ArrayStruct {
  int two, dimensions;
  char kind;
  int item_bytes, flags;
  const intptr_t *shape, *strides;
  const void* data;
};

// __array_interface__ makes a dict and a dozen objects for this one number.
uintptr_t address_of(nb::handle array) {
  const auto held = nb::cast<nb::capsule>(array.attr("__array_struct__"));
  return reinterpret_cast<uintptr_t>(static_cast<const ArrayStruct*>(held.data())->data);
}

// "": none that is compared.
std::optional<DataType> type_of(const std::string& name) {
  if (name.empty()) return std::nullopt;
  return named(find_data_type(name), "element type", name);
}

CallOptions options_of(const std::string& algorithm, bool fixed) {
  return {named(find_algorithm(algorithm), "algorithm", algorithm),
          fixed ? Order::fixed : Order::any};
}

// Memory of the communicator that keeps it alive.
struct Allocation {
  std::shared_ptr<Communicator> communicator;
  void* data;
  Allocation(std::shared_ptr<Communicator> c, void* d) : communicator(std::move(c)), data(d) {}
  ~Allocation() { communicator->release(data); }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
};

nb::object allocate(const std::shared_ptr<Communicator>& self, uint64_t bytes) {
  void* data = bindings::without_gil([&] { return self->allocate(bytes); });
  if (data == nullptr) return nb::none();
  auto held = std::make_unique<Allocation>(self, data);
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {bytes},
                                                      bindings::owner_of(std::move(held)))
      .cast();
}

std::shared_ptr<Communicator> open(const std::string& job, uint32_t rank, uint32_t ranks,
                                   double timeout, uint64_t window_bytes, uint64_t arena_bytes,
                                   const std::string& directory, const std::string& table) {
  CommunicatorConfig config;
  config.job = job;
  config.rank = rank;
  config.ranks = ranks;
  config.window_bytes = window_bytes;
  config.arena_bytes = arena_bytes;
  config.timeout = bindings::nanoseconds_of("the timeout of a communicator", timeout);
  config.directory = directory;
  config.selection = selection_text(table);
  return std::make_shared<Communicator>(config);
}

// Whether this thread makes calls for others: these compute meanwhile, and record their own waits.
thread_local bool serving = false;

// As what the calling thread records a call: from this rank's arrival to its end, so that what it
// takes longer than on others is waiting.
struct Recorded {
  trace::Kind peers, background;
  trace::Kind here() const noexcept { return serving ? background : peers; }
};

Recorded kind(std::string_view operation) {
  return {trace::define("peers", operation, {"count"}),
          trace::define("background", operation, {"count"})};
}

// Operations that reduce elements.
void bind_reductions(nb::class_<Communicator>& communicator) {
  communicator
      .def(
          "allreduce",
          [recorded = kind("allreduce")](Communicator& self, uintptr_t in, uintptr_t out,
                                         uint64_t count, const PyReducer& reducer,
                                         const std::string& algorithm, bool fixed) {
            bindings::without_gil([&] {
              trace::Span span(recorded.here());
              span.values[0] = static_cast<int64_t>(count);
              self.allreduce(address(in), writable(out), count, reducer.get(),
                             options_of(algorithm, fixed));
            });
            reducer.raise();
          },
          nb::arg("source"), nb::arg("target"), nb::arg("count"), nb::arg("reducer"),
          nb::arg("algorithm") = "cooperative", nb::arg("fixed") = false)
      .def(
          "two_level_allreduce",
          [recorded = kind("allreduce")](Communicator& self, nb::object leaders, uintptr_t data,
                                         uint64_t count, const PyReducer& reducer, bool fixed,
                                         uint64_t part_bytes) {
            std::optional<bindings::PythonLeaders> between;
            if (!leaders.is_none()) between.emplace(leaders, "");
            const Reducer& op = reducer.get();
            auto* const all = static_cast<std::byte*>(writable(data));
            try {
              bindings::without_gil([&] {
                trace::Span span(recorded.here());
                span.values[0] = static_cast<int64_t>(count);
                const uint32_t parts = parts_of(count * op.element_bytes(), part_bytes, kMostParts);
                two_level_allreduce(self, between ? &*between : nullptr,
                                    {all, all, count, &op, parts},
                                    options_of("cooperative", fixed));
              });
            } catch (const Error&) {
              if (between) between->raise();
              throw;
            }
          },
          nb::arg("leaders").none(), nb::arg("data"), nb::arg("count"), nb::arg("reducer"),
          nb::arg("fixed"), nb::arg("part_bytes"),
          "In place, over several nodes. `leaders` (None but on local rank 0): an object whose "
          "start(address, count, type) begins their allreduce of elements and returns an object "
          "with wait().")
      .def(
          "reduce",
          [recorded = kind("reduce")](Communicator& self, uintptr_t in, uintptr_t out,
                                      uint64_t count, const PyReducer& reducer, uint32_t root,
                                      const std::string& algorithm, bool fixed) {
            bindings::without_gil([&] {
              trace::Span span(recorded.here());
              span.values[0] = static_cast<int64_t>(count);
              self.reduce(address(in), writable(out), count, reducer.get(), root,
                          options_of(algorithm, fixed));
            });
            reducer.raise();
          },
          nb::arg("source"), nb::arg("target"), nb::arg("count"), nb::arg("reducer"),
          nb::arg("root"), nb::arg("algorithm") = "cooperative", nb::arg("fixed") = false);
}

// Operations that move bytes, and reduce_scatter.
void bind_moves(nb::class_<Communicator>& communicator) {
  const nb::call_guard<nb::gil_scoped_release> no_gil;
  communicator
      .def(
          "broadcast",
          [recorded = kind("broadcast")](Communicator& self, uintptr_t data, uint64_t bytes,
                                         uint32_t root, const std::string& type,
                                         const std::string& algorithm) {
            trace::Span span(recorded.here());
            span.values[0] = static_cast<int64_t>(bytes);
            self.broadcast(writable(data), bytes, root, options_of(algorithm, false),
                           type_of(type));
          },
          nb::arg("data"), nb::arg("bytes"), nb::arg("root"), nb::arg("type"),
          nb::arg("algorithm") = "cooperative", no_gil)
      .def(
          "reduce_scatter",
          [recorded = kind("reduce_scatter")](Communicator& self, uintptr_t in, uintptr_t out,
                                              const std::vector<uint64_t>& counts,
                                              const PyReducer& reducer, bool fixed) {
            const Order order = fixed ? Order::fixed : Order::any;
            const bool equal = counts.size() == 1;
            bindings::without_gil([&] {
              trace::Span span(recorded.here());
              const auto rank = std::min<size_t>(self.rank(), counts.size() - 1);
              span.values[0] = static_cast<int64_t>(counts.empty() ? 0 : counts[rank]);
              if (equal) {
                self.reduce_scatter(address(in), writable(out), counts[0], reducer.get(), order);
              } else {
                self.reduce_scatterv(address(in), writable(out), counts, reducer.get(), order);
              }
            });
            reducer.raise();
          },
          nb::arg("source"), nb::arg("target"), nb::arg("counts"), nb::arg("reducer"),
          nb::arg("fixed") = false,
          "counts[r] elements for rank r; one count is that of every rank.")
      .def(
          "allgather",
          [recorded = kind("allgather")](Communicator& self, uintptr_t in, uintptr_t out,
                                         uint64_t bytes, const std::string& type) {
            trace::Span span(recorded.here());
            span.values[0] = static_cast<int64_t>(bytes);
            self.allgather(address(in), writable(out), bytes, type_of(type));
          },
          nb::arg("source"), nb::arg("target"), nb::arg("bytes"), nb::arg("type"), no_gil,
          "`bytes` of each rank.")
      .def(
          "allgatherv",
          [recorded = kind("allgather")](
              Communicator& self, uintptr_t in, const std::vector<uintptr_t>& targets,
              const std::vector<uint64_t>& bytes, const std::string& type) {
            if (targets.size() != bytes.size()) {
              throw Error(ErrorKind::usage, "allgatherv needs as many targets as sizes");
            }
            std::vector<Gathered> parts;
            for (size_t r = 0; r < bytes.size(); ++r) {
              parts.push_back({writable(targets[r]), bytes[r]});
            }
            trace::Span span(recorded.here());
            span.values[0] =
                static_cast<int64_t>(self.rank() < bytes.size() ? bytes[self.rank()] : 0);
            self.allgatherv(address(in), parts, type_of(type));
          },
          nb::arg("source"), nb::arg("targets"), nb::arg("bytes"), nb::arg("type"), no_gil,
          "bytes[r] of each rank r, to targets[r].");
}

}  // namespace

void bind_collective(nb::module_& m) {
  nb::class_<PyReducer>(m, "Reducer", "An operation on elements (native/collective/reducer.h).")
      .def(nb::init<const std::string&, const std::string&>(), nb::arg("op"), nb::arg("type"))
      .def(nb::init<nb::object, uint64_t, bool>(), nb::arg("function"), nb::arg("element_bytes"),
           nb::arg("commutative"));
  nb::class_<CommunicatorStats>(m, "CommunicatorStats")
      .def_ro("calls", &CommunicatorStats::calls)
      .def_ro("bytes", &CommunicatorStats::bytes)
      .def_ro("sleeps", &CommunicatorStats::sleeps)
      .def_ro("wait_ns", &CommunicatorStats::wait_ns)
      .def_ro("imbalanced", &CommunicatorStats::imbalanced);
  const nb::call_guard<nb::gil_scoped_release> no_gil;
  nb::class_<Communicator> communicator(m, "Communicator",
                                        "Ranks of one node, on raw addresses (native/collective).");
  communicator.def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("ranks", &Communicator::ranks)
      .def(
          "barrier",
          [recorded = kind("barrier")](Communicator& self) {
            const trace::Span span(recorded.here());
            self.barrier();
          },
          no_gil)
      .def(
          "set_timeout",
          [](Communicator& self, double seconds) {
            self.set_timeout(bindings::nanoseconds_of("the timeout of a communicator", seconds));
          },
          nb::arg("seconds"), no_gil)
      .def(
          "abort",
          [](Communicator& self, const std::string& what) {
            self.end(Error(ErrorKind::peer, "rank " + std::to_string(self.rank()) + " " + what +
                                                "; make a new communicator"));
          },
          nb::arg("what") = "aborted it", no_gil, "`what` that rank did, for the others.")
      .def(
          "end_from_here",
          [](Communicator& self, const std::string& what) {
            self.end_from_here(Error(ErrorKind::peer, "rank " + std::to_string(self.rank()) + " " +
                                                          what + "; make a new communicator"));
          },
          nb::arg("what"), no_gil, "As abort, but others may end the calls that it has completed.")
      .def("leave", &Communicator::leave, no_gil)
      .def("stats", &Communicator::stats, no_gil);
  bind_reductions(communicator);
  bind_moves(communicator);
  m.def("open_communicator", &open, nb::arg("job"), nb::arg("rank"), nb::arg("ranks"),
        nb::arg("timeout"), nb::arg("window_bytes"), nb::arg("arena_bytes"), nb::arg("directory"),
        nb::arg("table"), no_gil, "Waits for all ranks.");
  m.def(
      "serve_collectives", [] { serving = true; },
      "Collectives of the calling thread count as background from now on.");
  m.def(
      "serves_collectives", [] { return serving; }, "Whether those of the calling thread do.");
  m.def("address_of", &address_of, nb::arg("array"), "Where a NumPy array lies.");
  m.def("allocate_shared", &allocate, nb::arg("communicator"), nb::arg("bytes"),
        "Bytes that all ranks reach, or None if the arena has no room.");
}
