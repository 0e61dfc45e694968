// Objects of Python in the hands of native threads.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

namespace nostall::bindings {

// A Python object that is released with the GIL, from any thread.
class Held {
 public:
  explicit Held(nanobind::object object) : object_(std::move(object)) {}
  ~Held() {
    if (!nanobind::is_alive()) {
      object_.release();  // the interpreter has gone, and its objects with it
      return;
    }
    const nanobind::gil_scoped_acquire gil;
    object_.reset();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  const nanobind::object& get() const { return object_; }

 private:
  nanobind::object object_;
};

}  // namespace nostall::bindings
