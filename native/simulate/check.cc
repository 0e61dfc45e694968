// Checks the arguments of both engines before they run.
#include "simulate/check.h"

#include <cmath>
#include <limits>
#include <string>

#include "base/error.h"

namespace nostall::simulate {

void check(const Model& model, const plan::JobSpec& spec, std::span<const double> sizes,
           const Decision& decision) {
  validate(model);
  plan::validate(spec);
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw Error(ErrorKind::usage, what);
  };
  require(spec.steps == 0, "the simulation is of whole epochs: leave steps out");
  require(spec.world == model.nodes,
          "the training has " + std::to_string(spec.world) +
              " nodes, the environment N = " + std::to_string(model.nodes));
  require(spec.samples == sizes.size() && spec.samples < std::numeric_limits<uint32_t>::max(),
          "there are " + std::to_string(sizes.size()) + " sizes for " +
              std::to_string(spec.samples) + " samples");
  // Of millions of samples: the words are made for the one that is refused.
  for (size_t s = 0; s < sizes.size(); ++s) {
    if (std::isfinite(sizes[s]) && sizes[s] >= 0) continue;
    require(false, "the size of sample " + std::to_string(s) + " is " + std::to_string(sizes[s]));
  }
  require(decision.owner.empty() || decision.owner.size() == sizes.size(),
          "a policy names the owners of " + std::to_string(decision.owner.size()) +
              " samples, not of " + std::to_string(sizes.size()));
  for (const uint32_t owner : decision.owner) {
    if (owner < model.nodes || owner == plan::kNoOwner) continue;
    require(false,
            "a policy names node " + std::to_string(owner) + " of " + std::to_string(model.nodes));
  }
  require(decision.copies.empty() ||
              (decision.copies.size() == model.nodes && decision.filling == Filling::reading &&
               decision.owner.size() == sizes.size()),
          "a policy copies by next use: it takes an owner of each sample, places on each node, and "
          "copies that are filled by reading");
  // A thousandth: the plan counts whole bytes.
  constexpr double kRounding = 1.001;
  for (size_t node = 0; node < decision.keep.size() && !decision.cleanup; ++node) {
    for (size_t j = 0; j < decision.keep[node].size() && j + 1 < model.classes.size(); ++j) {
      double mb = 0;
      for (const uint32_t s : decision.keep[node][j]) mb += s < sizes.size() ? sizes[s] : 0;
      require(mb <= model.classes[j + 1].capacity * kRounding + 1e-6,
              "a policy keeps " + std::to_string(mb) + " MB in storage class " +
                  std::to_string(j + 1) + " of node " + std::to_string(node) + ", which holds " +
                  std::to_string(model.classes[j + 1].capacity));
    }
  }
  const bool listed = decision.filling != Filling::none && decision.filling != Filling::evicting;
  require(!listed || !decision.keep.empty(),
          "a policy fills storage classes without naming what they keep");
}

}  // namespace nostall::simulate
