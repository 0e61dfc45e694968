// The coordinate arithmetic of each step, as torchvision and Python round it. Crops and resizes are
// folded into the current stage; draws come from the sample's own generator in the order of steps.
#include "image/geometry.h"

#include <algorithm>
#include <cmath>

namespace nostall::image {
namespace {

constexpr int kTries = 10;

class Composer {
 public:
  Composer(int64_t width, int64_t height, SampleRandom& random) : random_(random) {
    const Box all{0, 0, width, height};
    geometry_.stages.push_back({all, width, height, all});
  }

  void operator()(const Decode&) {}
  void operator()(const ToTensor&) {}
  void operator()(const Normalize&) {}
  void operator()(const RandomHorizontalFlip& step) {
    if (random_.uniform() < step.p) geometry_.mirror_x = !geometry_.mirror_x;
  }
  void operator()(const RandomVerticalFlip& step) {
    if (random_.uniform() < step.p) geometry_.mirror_y = !geometry_.mirror_y;
  }
  void operator()(const Resize& step) {
    if (step.width != 0) {
      resize(step.width, step.height);
      return;
    }
    const int64_t w = width(), h = height(), edge = step.height;
    // The longer edge is truncated, as torchvision does.
    const auto longer = [edge](int64_t from, int64_t to) {
      return static_cast<int64_t>(static_cast<double>(edge * from) / static_cast<double>(to));
    };
    if (w <= h) {
      resize(edge, longer(h, w));
    } else {
      resize(longer(w, h), edge);
    }
  }
  void operator()(const CenterCrop& step) {
    crop({offset(width(), step.width), offset(height(), step.height), step.width, step.height});
  }
  void operator()(const RandomResizedCrop& step) {
    crop(random_box(step, width(), height(), random_));
    resize(step.width, step.height);
  }

  Geometry take() { return std::move(geometry_); }

 private:
  int64_t width() const { return geometry_.stages.back().window.width; }
  int64_t height() const { return geometry_.stages.back().window.height; }

  // Of a centre crop: Python's int(round((have - want) / 2.0)) inside, (want - have) // 2 of
  // padding outside.
  static int64_t offset(int64_t have, int64_t want) {
    if (want > have) return -((want - have) / 2);
    return static_cast<int64_t>(std::nearbyint(static_cast<double>(have - want) / 2));
  }

  void crop(Box box) {
    Box& window = geometry_.stages.back().window;
    // Flips are applied last, so a box in mirrored coordinates is mirrored back.
    if (geometry_.mirror_x) box.x = window.width - box.x - box.width;
    if (geometry_.mirror_y) box.y = window.height - box.y - box.height;
    window = {window.x + box.x, window.y + box.y, box.width, box.height};
  }

  void resize(int64_t w, int64_t h) {
    if (w == width() && h == height()) return;
    Stage& last = geometry_.stages.back();
    if (last.resizes() || last.padded()) {
      const Box all{0, 0, width(), height()};
      geometry_.stages.push_back({all, w, h, {0, 0, w, h}});
      return;
    }
    const Box box{last.box.x + last.window.x, last.box.y + last.window.y, width(), height()};
    last = {box, w, h, {0, 0, w, h}};
  }

  SampleRandom& random_;
  Geometry geometry_;
};

}  // namespace

Box random_box(const RandomResizedCrop& step, int64_t width, int64_t height, SampleRandom& random) {
  std::array<double, 2 * kTries> shape;
  for (double& draw : shape) draw = random.uniform();
  const uint32_t down = random.next(), right = random.next();
  const auto below = [](uint32_t draw, int64_t bound) {
    return static_cast<int64_t>((uint64_t{draw} * static_cast<uint64_t>(bound)) >> 32);
  };

  const double area = static_cast<double>(width) * static_cast<double>(height);
  const double low = std::log(step.ratio[0]), high = std::log(step.ratio[1]);
  for (int i = 0; i < kTries; ++i) {
    const double target = area * (step.scale[0] + (step.scale[1] - step.scale[0]) * shape[2 * i]);
    const double ratio = std::exp(low + (high - low) * shape[2 * i + 1]);
    const double w = std::nearbyint(std::sqrt(target * ratio));
    const double h = std::nearbyint(std::sqrt(target / ratio));
    if (w >= 1 && h >= 1 && w <= static_cast<double>(width) && h <= static_cast<double>(height)) {
      const auto iw = static_cast<int64_t>(w), ih = static_cast<int64_t>(h);
      return {below(right, width - iw + 1), below(down, height - ih + 1), iw, ih};
    }
  }
  int64_t w = width, h = height;
  const double ratio = static_cast<double>(width) / static_cast<double>(height);
  if (ratio < step.ratio[0]) {
    h = static_cast<int64_t>(std::nearbyint(static_cast<double>(w) / step.ratio[0]));
  } else if (ratio > step.ratio[1]) {
    w = static_cast<int64_t>(std::nearbyint(static_cast<double>(h) * step.ratio[1]));
  }
  w = std::clamp<int64_t>(w, 1, width);
  h = std::clamp<int64_t>(h, 1, height);
  return {(width - w) / 2, (height - h) / 2, w, h};
}

Geometry compose(const std::vector<Step>& steps, int64_t width, int64_t height,
                 SampleRandom& random) {
  Composer composer(width, height, random);
  for (const Step& step : steps) std::visit(composer, step);
  return composer.take();
}

}  // namespace nostall::image
