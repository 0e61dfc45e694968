// Crops and resizes are folded into the current stage; a crop that would bring back what an earlier
// one took away, and one of another fill, start a new stage.
#include "image/geometry.h"

#include <type_traits>

namespace nostall::image {
namespace {

class Folder {
 public:
  Folder(int64_t width, int64_t height) {
    const Box all{0, 0, width, height};
    geometry_.stages.push_back({all, width, height, all});
  }

  // Each says whether it took the action.
  bool operator()(const Mirror& action) {
    bool& mirror = action.vertical ? geometry_.mirror_y : geometry_.mirror_x;
    mirror = !mirror;
    return true;
  }
  bool operator()(const Crop& action) {
    Box box = action.box;
    const Box& window = last().window;
    // Flips are applied last, so a box in mirrored coordinates is mirrored back.
    if (geometry_.mirror_x) box.x = window.width - box.x - box.width;
    if (geometry_.mirror_y) box.y = window.height - box.y - box.height;
    const bool grows = box.x < 0 || box.y < 0 || box.x + box.width > window.width ||
                       box.y + box.height > window.height;
    const Stage& now = last();
    const bool whole = window.x <= 0 && window.y <= 0 && window.x + window.width >= now.width &&
                       window.y + window.height >= now.height;
    if (grows && (!whole || (now.padded() && now.fill != action.fill.rgb))) add_stage();
    if (grows) last().fill = action.fill.rgb;
    Box& moved = last().window;
    moved = {moved.x + box.x, moved.y + box.y, box.width, box.height};
    return true;
  }
  bool operator()(const Scale& action) {
    if (action.width == geometry_.width() && action.height == geometry_.height()) return true;
    if (last().resizes() || last().padded()) {
      add_stage();
    } else {
      const Stage& now = last();
      const Box box{now.box.x + now.window.x, now.box.y + now.window.y, now.window.width,
                    now.window.height};
      geometry_.stages.back() = {box, box.width, box.height, {0, 0, box.width, box.height}};
    }
    Stage& stage = geometry_.stages.back();
    stage.width = stage.window.width = action.width;
    stage.height = stage.window.height = action.height;
    stage.interpolation = action.interpolation;
    stage.antialias = action.antialias;
    return true;
  }
  bool operator()(const Erase&) { return true; }
  bool operator()(const Clamp&) { return true; }
  bool operator()(const Sanitize&) { return true; }
  template <typename Other>
  bool operator()(const Other&) {
    return false;
  }

  Geometry take() { return std::move(geometry_); }

 private:
  Stage& last() { return geometry_.stages.back(); }
  void add_stage() {
    const int64_t width = geometry_.width(), height = geometry_.height();
    const Box all{0, 0, width, height};
    geometry_.stages.push_back({all, width, height, all});
  }

  Geometry geometry_;
};

}  // namespace

bool Geometry::idle() const noexcept {
  const Stage& stage = stages.front();
  return stages.size() == 1 && !mirror_x && !mirror_y && !stage.resizes() && stage.window.x == 0 &&
         stage.window.y == 0 && stage.window.width == stage.box.width &&
         stage.window.height == stage.box.height && stage.box.x == 0 && stage.box.y == 0;
}

Geometry fold(const std::vector<Action>& actions, size_t& next, int64_t width, int64_t height) {
  Folder folder(width, height);
  while (next < actions.size() && std::visit(folder, actions[next])) ++next;
  return folder.take();
}

}  // namespace nostall::image
