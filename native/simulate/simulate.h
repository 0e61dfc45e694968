// simulate/simulate.h - what a training would cost: the performance model of [Böhringer 2020, sec.
// 3.1 and 4.1], run on the loader's own plan.
//
// Read this first. A Model (model.h) is the machine, a plan::JobSpec the training (one rank per
// node), sizes are in MB, a Decision (decision.h) is what a policy decides. Two engines run them:
//   published   the simulation of [Böhringer 2020, sec. 4.1], sample by sample: every read takes
//               what equations 3.5 to 3.7 give at its start, whatever starts later. Together,
//               reads may take more than there is.
//   consistent  a fluid model, local batch by local batch: at every moment the source, each node's
//               link and each storage class give what they have and no more, shared max-min fair.
// Thread-safety: pure functions. Cost: published O(N log R) per read from the source, with R reads
// before it; consistent O(N * classes) per local batch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.h"
#include "simulate/decision.h"
#include "simulate/model.h"

namespace nostall::simulate {

struct Result {
  double seconds = 0;                   // from the start, what comes before the training included
  double initial_seconds = 0;           // before the first batch could begin (Filling::before)
  double warm_seconds = 0;              // when the last sample was put where it is kept
  std::vector<double> batch_seconds;    // [batch]: from the end of the one before to its end
  std::vector<double> compute_seconds;  // [batch]: of the slowest node alone
  std::vector<double> node_stall;       // [node]: seconds it waited for its own samples
  std::vector<double> epoch_seconds;    // [epoch]; the first one without initial_seconds
  // MB into the staging buffers, over all nodes, by [class - 1], then from other nodes, then from
  // the source.
  std::vector<double> staged;
  // MB into storage classes from other nodes, and from the source, beside those reads.
  double kept_from_nodes = 0, kept_from_source = 0;
  std::vector<double> epoch_source;  // [epoch]: MB from the source for its accesses
};

// `sizes`: MB, one per sample. spec.world is the number of nodes. Throws Error(usage) if the
// arguments do not go together.
Result published(const Model& model, const plan::JobSpec& spec, std::span<const double> sizes,
                 const Decision& decision);
Result consistent(const Model& model, const plan::JobSpec& spec, std::span<const double> sizes,
                  const Decision& decision);

}  // namespace nostall::simulate
