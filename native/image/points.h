// image/points.h - boxes and keypoints through the actions of a sample, in single precision and in
// the order of torchvision's operations. Thread-safety: functions of their arguments.
#pragma once

#include <optional>

#include "image/draw.h"
#include "image/targets.h"

namespace nostall::image {

// Both write the places of `boxes` or `keypoints`; an Error as Pipeline::apply_record's.
// `sanitizes`: the drawing takes out boxes whose coordinates are no numbers.
std::optional<Error> move_boxes(const Drawing& drawing, bool sanitizes, Boxes& boxes);
std::optional<Error> move_keypoints(const Drawing& drawing, const Keypoints& keypoints);

}  // namespace nostall::image
