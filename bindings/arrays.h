// Vectors to NumPy arrays that own them, and work without the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace nostall::bindings {

using Ids =
    nanobind::ndarray<const uint64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// A capsule that deletes `value` when the last array on it dies.
template <typename T>
nanobind::capsule owner_of(std::unique_ptr<T> value) {
  return nanobind::capsule(value.release(),
                           [](void* p) noexcept { std::unique_ptr<T>(static_cast<T*>(p)); });
}

template <typename T>
nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>> array_of(std::vector<T> values) {
  auto kept = std::make_unique<std::vector<T>>(std::move(values));
  T* data = kept->data();
  const size_t size = kept->size();
  return nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>(data, {size},
                                                                  owner_of(std::move(kept)));
}

template <typename Function>
auto without_gil(Function&& function) {
  const nanobind::gil_scoped_release release;
  return function();
}

// For work without the GIL that may take long: throws what a handler of a signal raises.
inline void look_at_signals() {
  const nanobind::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

}  // namespace nostall::bindings
