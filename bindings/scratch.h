// What a thread decodes with outside of a loader.
#pragma once

#include <memory>
#include <utility>

#include "image/pipeline.h"

namespace nostall::bindings {

// Kept by the thread from one use to the next. A use within a use, as a decoder in Python may have, gets
// one of its own. Constructed with the GIL, where Python has one: image/decode.h says why.
template <typename Scratch>
class Lent {
 public:
  Lent() : scratch_(std::exchange(kept(), nullptr)) {
    if (!scratch_) scratch_ = std::make_unique<Scratch>();
  }
  ~Lent() {
    scratch_->trim(image::Scratch::kKept);
    kept() = std::move(scratch_);
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  Scratch& get() const { return *scratch_; }

 private:
  static std::unique_ptr<Scratch>& kept() {
    thread_local std::unique_ptr<Scratch> kept;
    return kept;
  }
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace nostall::bindings
