// torchvision's spaces of operations and magnitudes, and the sub-policies of AutoAugment.
#include "image/policies.h"

#include <cmath>
#include <numbers>
#include <string_view>

#include "image/projection.h"

namespace nostall::image {
namespace {

// In torchvision's order: a draw picks by place. AutoAugment alone has invert, RandAugment and
// TrivialAugmentWide alone have identity.
enum class Op : uint8_t {
  identity,
  shear_x,
  shear_y,
  translate_x,
  translate_y,
  rotate,
  brightness,
  color,
  contrast,
  sharpness,
  posterize,
  solarize,
  autocontrast,
  equalize,
  invert,
};
constexpr uint32_t kOps = 14;  // without invert

bool is_signed(Op op) { return op >= Op::shear_x && op <= Op::sharpness; }

// The highest magnitudes of a space.
struct Space {
  double shear, translate_x, translate_y, rotate, factor;
  double posterized;  // bits taken away
};

Space standard_space(const Drawing& drawing) {
  return {0.3,
          150.0 / 331.0 * static_cast<double>(drawing.width),
          150.0 / 331.0 * static_cast<double>(drawing.height),
          30.0,
          0.9,
          4.0};
}
constexpr Space kWide{0.99, 32.0, 32.0, 135.0, 0.99, 6.0};

// torch.linspace(0, high, bins)[bin], which counts from the nearer end, in single precision.
double linspace(double high, uint32_t bins, uint32_t bin) {
  if (bins == 1) return 0;
  const float end = static_cast<float>(high), step = end / static_cast<float>(bins - 1);
  return bin < bins / 2 ? step * static_cast<float>(bin)
                        : end - step * static_cast<float>(bins - 1 - bin);
}

double magnitude_of(Op op, const Space& space, uint32_t bins, uint32_t bin) {
  switch (op) {
    case Op::shear_x:
    case Op::shear_y:
      return linspace(space.shear, bins, bin);
    case Op::translate_x:
      return linspace(space.translate_x, bins, bin);
    case Op::translate_y:
      return linspace(space.translate_y, bins, bin);
    case Op::rotate:
      return linspace(space.rotate, bins, bin);
    case Op::brightness:
    case Op::color:
    case Op::contrast:
    case Op::sharpness:
      return linspace(space.factor, bins, bin);
    case Op::posterize: {
      const double each = static_cast<double>(bins - 1) / space.posterized;
      return 8 - (bins == 1 ? 0 : std::nearbyint(static_cast<double>(bin) / each));
    }
    case Op::solarize:
      return 1 - linspace(1, bins, bin);
    default:
      return 0;
  }
}

void add_warp(const Affine& affine, Point center, Interpolation interpolation, const Fill& fill,
              Drawing& drawing) {
  Warp warp = affine_warp(affine, center);
  warp.interpolation = interpolation;
  warp.fill = fill;
  drawing.actions.emplace_back(warp);
}

void add(Op op, double magnitude, Interpolation interpolation, const Fill& fill, Drawing& drawing) {
  const Point center{static_cast<double>(drawing.width) / 2,
                     static_cast<double>(drawing.height) / 2};
  const auto tone = [&](Tone name, double amount) {
    drawing.actions.emplace_back(Color{name, amount});
  };
  const double sheared = std::atan(magnitude) * (180.0 / std::numbers::pi);
  switch (op) {
    case Op::identity:
      return;
    case Op::shear_x:
      return add_warp({0, {}, 1, {sheared, 0}}, {}, interpolation, fill, drawing);
    case Op::shear_y:
      return add_warp({0, {}, 1, {0, sheared}}, {}, interpolation, fill, drawing);
    case Op::translate_x:
      return add_warp({0, {std::trunc(magnitude), 0}, 1, {}}, center, interpolation, fill, drawing);
    case Op::translate_y:
      return add_warp({0, {0, std::trunc(magnitude)}, 1, {}}, center, interpolation, fill, drawing);
    case Op::rotate: {
      Warp warp = rotation_warp(magnitude, center);
      warp.interpolation = interpolation;
      warp.fill = fill;
      drawing.actions.emplace_back(warp);
      return;
    }
    case Op::brightness:
      return tone(Tone::brightness, 1 + magnitude);
    case Op::color:
      return tone(Tone::saturation, 1 + magnitude);
    case Op::contrast:
      return tone(Tone::contrast, 1 + magnitude);
    case Op::sharpness:
      return tone(Tone::sharpness, 1 + magnitude);
    case Op::posterize:
      return tone(Tone::posterize, magnitude);
    case Op::solarize:
      return tone(Tone::solarize, 255 * magnitude);
    case Op::autocontrast:
      return tone(Tone::autocontrast, 0);
    case Op::equalize:
      return tone(Tone::equalize, 0);
    case Op::invert:
      return tone(Tone::invert, 0);
  }
}

struct Part {
  Op op;
  double p;
  uint32_t bin;
};
using SubPolicy = std::array<Part, 2>;
using SubPolicies = std::array<SubPolicy, 25>;

constexpr SubPolicies kImageNet{{
    SubPolicy{{{Op::posterize, 0.4, 8}, {Op::rotate, 0.6, 9}}},
    SubPolicy{{{Op::solarize, 0.6, 5}, {Op::autocontrast, 0.6, 0}}},
    SubPolicy{{{Op::equalize, 0.8, 0}, {Op::equalize, 0.6, 0}}},
    SubPolicy{{{Op::posterize, 0.6, 7}, {Op::posterize, 0.6, 6}}},
    SubPolicy{{{Op::equalize, 0.4, 0}, {Op::solarize, 0.2, 4}}},
    SubPolicy{{{Op::equalize, 0.4, 0}, {Op::rotate, 0.8, 8}}},
    SubPolicy{{{Op::solarize, 0.6, 3}, {Op::equalize, 0.6, 0}}},
    SubPolicy{{{Op::posterize, 0.8, 5}, {Op::equalize, 1.0, 0}}},
    SubPolicy{{{Op::rotate, 0.2, 3}, {Op::solarize, 0.6, 8}}},
    SubPolicy{{{Op::equalize, 0.6, 0}, {Op::posterize, 0.4, 6}}},
    SubPolicy{{{Op::rotate, 0.8, 8}, {Op::color, 0.4, 0}}},
    SubPolicy{{{Op::rotate, 0.4, 9}, {Op::equalize, 0.6, 0}}},
    SubPolicy{{{Op::equalize, 0.0, 0}, {Op::equalize, 0.8, 0}}},
    SubPolicy{{{Op::invert, 0.6, 0}, {Op::equalize, 1.0, 0}}},
    SubPolicy{{{Op::color, 0.6, 4}, {Op::contrast, 1.0, 8}}},
    SubPolicy{{{Op::rotate, 0.8, 8}, {Op::color, 1.0, 2}}},
    SubPolicy{{{Op::color, 0.8, 8}, {Op::solarize, 0.8, 7}}},
    SubPolicy{{{Op::sharpness, 0.4, 7}, {Op::invert, 0.6, 0}}},
    SubPolicy{{{Op::shear_x, 0.6, 5}, {Op::equalize, 1.0, 0}}},
    SubPolicy{{{Op::color, 0.4, 0}, {Op::equalize, 0.6, 0}}},
    SubPolicy{{{Op::equalize, 0.4, 0}, {Op::solarize, 0.2, 4}}},
    SubPolicy{{{Op::solarize, 0.6, 5}, {Op::autocontrast, 0.6, 0}}},
    SubPolicy{{{Op::invert, 0.6, 0}, {Op::equalize, 1.0, 0}}},
    SubPolicy{{{Op::color, 0.6, 4}, {Op::contrast, 1.0, 8}}},
    SubPolicy{{{Op::equalize, 0.8, 0}, {Op::equalize, 0.6, 0}}},
}};
constexpr SubPolicies kCifar10{{
    SubPolicy{{{Op::invert, 0.1, 0}, {Op::contrast, 0.2, 6}}},
    SubPolicy{{{Op::rotate, 0.7, 2}, {Op::translate_x, 0.3, 9}}},
    SubPolicy{{{Op::sharpness, 0.8, 1}, {Op::sharpness, 0.9, 3}}},
    SubPolicy{{{Op::shear_y, 0.5, 8}, {Op::translate_y, 0.7, 9}}},
    SubPolicy{{{Op::autocontrast, 0.5, 0}, {Op::equalize, 0.9, 0}}},
    SubPolicy{{{Op::shear_y, 0.2, 7}, {Op::posterize, 0.3, 7}}},
    SubPolicy{{{Op::color, 0.4, 3}, {Op::brightness, 0.6, 7}}},
    SubPolicy{{{Op::sharpness, 0.3, 9}, {Op::brightness, 0.7, 9}}},
    SubPolicy{{{Op::equalize, 0.6, 0}, {Op::equalize, 0.5, 0}}},
    SubPolicy{{{Op::contrast, 0.6, 7}, {Op::sharpness, 0.6, 5}}},
    SubPolicy{{{Op::color, 0.7, 7}, {Op::translate_x, 0.5, 8}}},
    SubPolicy{{{Op::equalize, 0.3, 0}, {Op::autocontrast, 0.4, 0}}},
    SubPolicy{{{Op::translate_y, 0.4, 3}, {Op::sharpness, 0.2, 6}}},
    SubPolicy{{{Op::brightness, 0.9, 6}, {Op::color, 0.2, 8}}},
    SubPolicy{{{Op::solarize, 0.5, 2}, {Op::invert, 0.0, 0}}},
    SubPolicy{{{Op::equalize, 0.2, 0}, {Op::autocontrast, 0.6, 0}}},
    SubPolicy{{{Op::equalize, 0.2, 0}, {Op::equalize, 0.6, 0}}},
    SubPolicy{{{Op::color, 0.9, 9}, {Op::equalize, 0.6, 0}}},
    SubPolicy{{{Op::autocontrast, 0.8, 0}, {Op::solarize, 0.2, 8}}},
    SubPolicy{{{Op::brightness, 0.1, 3}, {Op::color, 0.7, 0}}},
    SubPolicy{{{Op::solarize, 0.4, 5}, {Op::autocontrast, 0.9, 0}}},
    SubPolicy{{{Op::translate_y, 0.9, 9}, {Op::translate_y, 0.7, 9}}},
    SubPolicy{{{Op::autocontrast, 0.9, 0}, {Op::solarize, 0.8, 3}}},
    SubPolicy{{{Op::equalize, 0.8, 0}, {Op::invert, 0.1, 0}}},
    SubPolicy{{{Op::translate_y, 0.7, 9}, {Op::autocontrast, 0.9, 0}}},
}};
constexpr SubPolicies kSvhn{{
    SubPolicy{{{Op::shear_x, 0.9, 4}, {Op::invert, 0.2, 0}}},
    SubPolicy{{{Op::shear_y, 0.9, 8}, {Op::invert, 0.7, 0}}},
    SubPolicy{{{Op::equalize, 0.6, 0}, {Op::solarize, 0.6, 6}}},
    SubPolicy{{{Op::invert, 0.9, 0}, {Op::equalize, 0.6, 0}}},
    SubPolicy{{{Op::equalize, 0.6, 0}, {Op::rotate, 0.9, 3}}},
    SubPolicy{{{Op::shear_x, 0.9, 4}, {Op::autocontrast, 0.8, 0}}},
    SubPolicy{{{Op::shear_y, 0.9, 8}, {Op::invert, 0.4, 0}}},
    SubPolicy{{{Op::shear_y, 0.9, 5}, {Op::solarize, 0.2, 6}}},
    SubPolicy{{{Op::invert, 0.9, 0}, {Op::autocontrast, 0.8, 0}}},
    SubPolicy{{{Op::equalize, 0.6, 0}, {Op::rotate, 0.9, 3}}},
    SubPolicy{{{Op::shear_x, 0.9, 4}, {Op::solarize, 0.3, 3}}},
    SubPolicy{{{Op::shear_y, 0.8, 8}, {Op::invert, 0.7, 0}}},
    SubPolicy{{{Op::equalize, 0.9, 0}, {Op::translate_y, 0.6, 6}}},
    SubPolicy{{{Op::invert, 0.9, 0}, {Op::equalize, 0.6, 0}}},
    SubPolicy{{{Op::contrast, 0.3, 3}, {Op::rotate, 0.8, 4}}},
    SubPolicy{{{Op::invert, 0.8, 0}, {Op::translate_y, 0.0, 2}}},
    SubPolicy{{{Op::shear_y, 0.7, 6}, {Op::solarize, 0.4, 8}}},
    SubPolicy{{{Op::invert, 0.6, 0}, {Op::rotate, 0.8, 4}}},
    SubPolicy{{{Op::shear_y, 0.3, 7}, {Op::translate_x, 0.9, 3}}},
    SubPolicy{{{Op::shear_x, 0.1, 6}, {Op::invert, 0.6, 0}}},
    SubPolicy{{{Op::solarize, 0.7, 2}, {Op::translate_y, 0.6, 7}}},
    SubPolicy{{{Op::shear_y, 0.8, 4}, {Op::invert, 0.8, 0}}},
    SubPolicy{{{Op::shear_x, 0.7, 9}, {Op::translate_y, 0.8, 3}}},
    SubPolicy{{{Op::shear_y, 0.8, 5}, {Op::autocontrast, 0.7, 0}}},
    SubPolicy{{{Op::shear_x, 0.7, 2}, {Op::invert, 0.1, 0}}},
}};

const SubPolicies& table_of(Policy policy) {
  switch (policy) {
    case Policy::cifar10:
      return kCifar10;
    case Policy::svhn:
      return kSvhn;
    default:
      return kImageNet;
  }
}

}  // namespace

void draw_policy(const RandAugment& step, SampleRandom& random, Drawing& drawing) {
  const Space space = standard_space(drawing);
  for (uint32_t i = 0; i < step.num_ops; ++i) {
    const auto op = static_cast<Op>(random.below(kOps));
    const bool negative = random.uniform() < 0.5;
    double magnitude = magnitude_of(op, space, step.num_magnitude_bins, step.magnitude);
    if (is_signed(op) && negative) magnitude = -magnitude;
    add(op, magnitude, step.interpolation, step.fill, drawing);
  }
}

void draw_policy(const TrivialAugmentWide& step, SampleRandom& random, Drawing& drawing) {
  const auto op = static_cast<Op>(random.below(kOps));
  const uint32_t bin = random.below(step.num_magnitude_bins);
  const bool negative = random.uniform() < 0.5;
  double magnitude = magnitude_of(op, kWide, step.num_magnitude_bins, bin);
  if (is_signed(op) && negative) magnitude = -magnitude;
  add(op, magnitude, step.interpolation, step.fill, drawing);
}

void draw_policy(const AutoAugment& step, SampleRandom& random, Drawing& drawing) {
  constexpr uint32_t kBins = 10;
  const Space space = standard_space(drawing);
  const SubPolicy& parts = table_of(step.policy)[random.below(25)];
  for (const Part& part : parts) {
    const bool wanted = random.uniform() < part.p;
    const bool negative = random.uniform() < 0.5;
    if (!wanted) continue;
    double magnitude = magnitude_of(part.op, space, kBins, part.bin);
    if (is_signed(part.op) && negative) magnitude = -magnitude;
    add(part.op, magnitude, step.interpolation, step.fill, drawing);
  }
}

}  // namespace nostall::image
