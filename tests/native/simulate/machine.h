// The small cluster of [Böhringer 2020, sec. 5.2.1].
#pragma once

#include <vector>

#include "plan/plan.h"
#include "simulate/model.h"

namespace nostall::simulate {

inline Model small_cluster(uint32_t nodes = 4) {
  Model model;
  model.nodes = nodes;
  model.compute = 100;
  model.preprocess = 200;
  model.network = 10000;
  model.source_link = 2000;
  model.source = {{1, 66}, {2, 86}, {3, 129}, {4, 146}};
  const Curve memory = {{1, 16550}, {2, 21164}}, disk = {{1, 66}, {2, 86}};
  model.classes = {{1024, 2, memory, {}}, {51200, 2, memory, {}}, {102400, 2, disk, {}}};
  return model;
}

inline plan::JobSpec training(uint64_t samples, uint32_t epochs, uint32_t nodes = 4) {
  plan::JobSpec spec;
  spec.samples = samples;
  spec.global_batch = 20 * nodes;
  spec.epochs = epochs;
  spec.world = nodes;
  spec.drop_last = true;
  return spec;
}

// Sizes between `least` and twice as much, MB.
inline std::vector<double> sizes_of(uint64_t samples, double least) {
  std::vector<double> sizes;
  for (uint64_t s = 0; s < samples; ++s) {
    sizes.push_back(least * (1 + static_cast<double>(s * 7919 % 1000) / 1000));
  }
  return sizes;
}

inline std::vector<uint64_t> bytes_of(const std::vector<double>& sizes) {
  std::vector<uint64_t> bytes;
  for (const double s : sizes) bytes.push_back(static_cast<uint64_t>(s * 1e6));
  return bytes;
}

}  // namespace nostall::simulate
