// Checks of a model, interpolation, and the rates that follow from its curves.
#include "simulate/model.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"

namespace nostall::simulate {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw Error(ErrorKind::usage, what);
}

void require_positive(double value, const std::string& name) {
  require(std::isfinite(value) && value > 0,
          name + " must be a positive number, not " + std::to_string(value));
}

void require_curve(const Curve& curve, const std::string& name) {
  require(!curve.empty(), name + " has no points");
  for (size_t i = 0; i < curve.size(); ++i) {
    require_positive(curve[i].first, "a key of " + name);
    require_positive(curve[i].second, name);
    require(i == 0 || curve[i - 1].first < curve[i].first, "the keys of " + name + " must ascend");
  }
}

}  // namespace

double interpolate(const Curve& curve, double at) {
  const auto above = std::lower_bound(curve.begin(), curve.end(), at,
                                      [](const auto& point, double x) { return point.first < x; });
  if (above == curve.end()) return curve.back().second;
  if (above == curve.begin() || above->first == at) return above->second;
  const auto below = above - 1;
  return below->second +
         (at - below->first) * (above->second - below->second) / (above->first - below->first);
}

double Model::thread_read(size_t j) const {
  return interpolate(classes[j].read, classes[j].threads) / classes[j].threads;
}

double Model::thread_write(size_t j) const {
  if (classes[j].write.empty()) return 0;
  return interpolate(classes[j].write, classes[j].threads) / classes[j].threads;
}

double Model::source_share(uint32_t gamma) const {
  return std::min(source_link, interpolate(source, gamma) / gamma);
}

double Model::stage_seconds() const {
  // Where only the reads of a class were measured, its writes are taken to be as fast.
  const double write = classes[0].write.empty() ? thread_read(0) : thread_write(0);
  return std::max(1 / preprocess, 1 / write);
}

void validate(const Model& model) {
  require(model.nodes >= 1, "N must be at least 1");
  require_positive(model.compute, "c");
  require_positive(model.preprocess, "beta");
  require_positive(model.network, "b_c");
  require_positive(model.source_link, "b_fs");
  require_curve(model.source, "t");
  require(std::isfinite(model.step_seconds) && model.step_seconds >= 0,
          "the seconds added to a step must not be negative");
  require(!model.classes.empty(), "there is no staging buffer: storage class 0 is missing");
  require(model.classes.size() <= 16, "there are more than 15 storage classes");
  for (size_t j = 0; j < model.classes.size(); ++j) {
    const StorageClass& c = model.classes[j];
    const std::string index = std::to_string(j);
    require(std::isfinite(c.capacity) && c.capacity >= 0,
            "d_" + index + " must not be negative: " + std::to_string(c.capacity));
    require(c.threads >= 1, "p_" + index + " must be at least 1");
    require_curve(c.read, "r_" + index);
    if (!c.write.empty()) require_curve(c.write, "w_" + index);
  }
  require_positive(model.classes[0].capacity, "d_0");
}

}  // namespace nostall::simulate
