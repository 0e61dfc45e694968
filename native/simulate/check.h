// simulate/check.h - whether a model, a training, sizes and a decision go together.
#pragma once

#include <span>

#include "plan/plan.h"
#include "simulate/decision.h"
#include "simulate/model.h"

namespace nostall::simulate {

// Throws Error(usage) and names what does not go together.
void check(const Model& model, const plan::JobSpec& spec, std::span<const double> sizes,
           const Decision& decision);

}  // namespace nostall::simulate
