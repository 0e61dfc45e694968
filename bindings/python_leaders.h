// Local leaders that Python connects, for collective/two_level.h.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collective/two_level.h"
#include "text.h"

namespace nostall::bindings {

// `start(address, count, type)` of an object starts the allreduce of elements in place, and returns
// an object whose wait() returns at its end. Python owns the memory at `address` for as long as it
// is used. Calls are made with the GIL, which Python's side releases while it waits.
class PythonLeaders final : public collective::Leaders {
 public:
  // Keeps a reference of its own; constructed and destroyed with or without the GIL.
  PythonLeaders(nanobind::handle object, std::string type) : type_(std::move(type)) {
    const nanobind::gil_scoped_acquire gil;
    object_ = nanobind::borrow(object);
  }
  ~PythonLeaders() override {
    const nanobind::gil_scoped_acquire gil;
    works_.clear();
    object_.reset();
    raised_ = nullptr;
  }
  PythonLeaders(const PythonLeaders&) = delete;
  PythonLeaders& operator=(const PythonLeaders&) = delete;

  std::byte* begin(const collective::TwoLevelMessage& message) override {
    message_ = message;
    return message.out;
  }
  void start(uint32_t part) override {
    call([&] {
      const collective::Extent extent = message_.part(part);
      const auto address =
          reinterpret_cast<uintptr_t>(message_.out + message_.offset(extent.begin));
      works_.push_back(object_.attr("start")(address, extent.count, type_));
    });
  }
  void finish(uint32_t part) override {
    call([&] { works_[part].attr("wait")(); });
  }

  // With the GIL: raises what Python raised in a call, if anything.
  void raise() {
    if (std::exception_ptr error = std::exchange(raised_, nullptr)) std::rethrow_exception(error);
  }

 private:
  // The node's other ranks and the engine know errors of their own only.
  template <typename Function>
  void call(Function&& function) {
    const nanobind::gil_scoped_acquire gil;
    try {
      function();
    } catch (nanobind::python_error& error) {
      const std::string why = text_of(error.value());
      raised_ = std::current_exception();
      throw Error(ErrorKind::peer, "the connection between nodes failed: " + why);
    }
  }

  nanobind::object object_;
  const std::string type_;
  collective::TwoLevelMessage message_;
  std::vector<nanobind::object> works_;
  std::exception_ptr raised_;
};

}  // namespace nostall::bindings
