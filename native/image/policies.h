// image/policies.h - RandAugment, TrivialAugmentWide and AutoAugment as actions.
// Thread-safety: functions of their arguments.
#pragma once

#include "image/draw.h"

namespace nostall::image {

// Each appends what it draws to the drawing, whose canvas stays.
void draw_policy(const RandAugment& step, SampleRandom& random, Drawing& drawing);
void draw_policy(const TrivialAugmentWide& step, SampleRandom& random, Drawing& drawing);
void draw_policy(const AutoAugment& step, SampleRandom& random, Drawing& drawing);

}  // namespace nostall::image
