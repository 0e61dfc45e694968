// What MixUp and CutMix drew for a batch, as Python gets it.
#pragma once

#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>

#include "image/mix.h"
#include "text.h"

namespace nostall::bindings {

// none, mixup or cutmix; lam; the box (x, y, width, height).
inline auto tuple_of(const image::Mixture& drawn) {
  constexpr const char* kKinds[] = {"none", "mixup", "cutmix"};
  const image::Box& box = drawn.box;
  return std::make_tuple(std::string(kKinds[static_cast<size_t>(drawn.kind)]), drawn.lam,
                         std::make_tuple(box.x, box.y, box.width, box.height));
}

}  // namespace nostall::bindings
