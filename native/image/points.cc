// A box keeps its format from action to action, as torchvision's do, so that both round alike; it
// becomes (x1, y1, x2, y2) only to be clamped or turned.
#include "image/points.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

namespace nostall::image {
namespace {

using Row = std::array<float, 4>;

Row to_corners(Row b, BoxFormat format) {
  if (format == BoxFormat::cxcywh) {
    b[0] -= b[2] / 2;
    b[1] -= b[3] / 2;
  }
  if (format != BoxFormat::xyxy) {
    b[2] += b[0];
    b[3] += b[1];
  }
  return b;
}

Row from_corners(Row b, BoxFormat format) {
  if (format == BoxFormat::xyxy) return b;
  b[2] -= b[0];
  b[3] -= b[1];
  if (format == BoxFormat::cxcywh) {
    b[0] = (b[0] * 2 + b[2]) / 2;
    b[1] = (b[1] * 2 + b[3]) / 2;
  }
  return b;
}

std::array<float, 2> project(const Projection& to, float x, float y) {
  const auto at = [&](size_t i) { return static_cast<float>(to[i]); };
  const float u = at(0) * x + at(1) * y + at(2), v = at(3) * x + at(4) * y + at(5);
  if (to[6] == 0 && to[7] == 0) return {u, v};
  const float scale = at(6) * x + at(7) * y + 1;
  return {u / scale, v / scale};
}

// The canvas as the actions go on.
struct Canvas {
  float width, height;
  explicit Canvas(const Drawing& drawing)
      : width(static_cast<float>(drawing.from_width)),
        height(static_cast<float>(drawing.from_height)) {}
  void set(int64_t w, int64_t h) {
    width = static_cast<float>(w);
    height = static_cast<float>(h);
  }
  void after(const Crop& a) { set(a.box.width, a.box.height); }
  void after(const Scale& a) { set(a.width, a.height); }
  void after(const Border& a) {
    width += static_cast<float>(a.left + a.right);
    height += static_cast<float>(a.top + a.bottom);
  }
  template <typename Other>
  void after(const Other&) {}
  // Of a Scale: the ratios of sides.
  std::array<float, 2> ratios(const Scale& a) const {
    return {static_cast<float>(static_cast<double>(a.width) / static_cast<double>(width)),
            static_cast<float>(static_cast<double>(a.height) / static_cast<double>(height))};
  }
};

class BoxMover {
 public:
  BoxMover(const Canvas& canvas, BoxFormat format, Row& row)
      : canvas_(canvas), format_(format), b_(row) {}

  // Each says whether the box stays.
  bool operator()(const Crop& a) { return shift(-a.box.x, -a.box.y, a); }
  bool operator()(const Border& a) { return shift(a.left, a.top, a); }
  bool operator()(const Scale& a) {
    const auto [x, y] = canvas_.ratios(a);
    for (size_t i = 0; i < 4; i += 2) {
      b_[i] *= x;
      b_[i + 1] *= y;
    }
    return true;
  }
  bool operator()(const Mirror& a) {
    const size_t low = a.vertical ? 1 : 0, high = low + 2;
    const float size = a.vertical ? canvas_.height : canvas_.width;
    const auto mirrored = [size](float at) { return -(at - size); };
    if (format_ == BoxFormat::xyxy) {
      const float first = b_[low];
      b_[low] = mirrored(b_[high]);
      b_[high] = mirrored(first);
    } else {
      b_[low] = mirrored(format_ == BoxFormat::xywh ? b_[low] + b_[high] : b_[low]);
    }
    return true;
  }
  bool operator()(const Warp& a) {
    const Row c = to_corners(b_, format_);
    const auto p = project(a.to_result, c[0], c[1]), q = project(a.to_result, c[2], c[1]);
    const auto r = project(a.to_result, c[2], c[3]), s = project(a.to_result, c[0], c[3]);
    // A corner on the horizon of a perspective has no place, and so has the box.
    for (const auto& corner : {p, q, r, s}) {
      if (!std::isnan(corner[0]) && !std::isnan(corner[1])) continue;
      b_.fill(std::numeric_limits<float>::quiet_NaN());
      return true;
    }
    clamp({std::min({p[0], q[0], r[0], s[0]}), std::min({p[1], q[1], r[1], s[1]}),
           std::max({p[0], q[0], r[0], s[0]}), std::max({p[1], q[1], r[1], s[1]})},
          canvas_);
    return true;
  }
  bool operator()(const Clamp&) {
    clamp(to_corners(b_, format_), canvas_);
    return true;
  }
  bool operator()(const Sanitize& a) {
    const Row c = to_corners(b_, format_);
    const float width = c[2] - c[0], height = c[3] - c[1];
    const bool inside = c[0] >= 0 && c[1] >= 0 && c[2] >= 0 && c[3] >= 0 && c[0] <= canvas_.width &&
                        c[2] <= canvas_.width && c[1] <= canvas_.height && c[3] <= canvas_.height;
    return inside && width >= a.min_size && height >= a.min_size && width * height >= a.min_area;
  }
  template <typename Other>
  bool operator()(const Other&) {
    return true;
  }

 private:
  template <typename Moved>
  bool shift(int64_t x, int64_t y, const Moved& action) {
    const auto dx = static_cast<float>(x), dy = static_cast<float>(y);
    b_[0] += dx;
    b_[1] += dy;
    if (format_ == BoxFormat::xyxy) {
      b_[2] += dx;
      b_[3] += dy;
    }
    Canvas next = canvas_;
    next.after(action);
    clamp(to_corners(b_, format_), next);
    return true;
  }
  void clamp(Row c, const Canvas& canvas) {
    for (size_t i = 0; i < 4; ++i) {
      c[i] = std::clamp(c[i], 0.0f, i % 2 == 0 ? canvas.width : canvas.height);
    }
    b_ = from_corners(c, format_);
  }

  const Canvas& canvas_;
  BoxFormat format_;
  Row& b_;
};

class PointMover {
 public:
  PointMover(const Canvas& canvas, float& x, float& y) : canvas_(canvas), x_(x), y_(y) {}
  void operator()(const Crop& a) {
    x_ -= static_cast<float>(a.box.x);
    y_ -= static_cast<float>(a.box.y);
  }
  void operator()(const Border& a) {
    x_ += static_cast<float>(a.left);
    y_ += static_cast<float>(a.top);
  }
  void operator()(const Scale& a) {
    const auto [x, y] = canvas_.ratios(a);
    x_ *= x;
    y_ *= y;
  }
  void operator()(const Mirror& a) {
    // A keypoint is the centre of a pixel, counted from 0.
    float& at = a.vertical ? y_ : x_;
    at = -(at - ((a.vertical ? canvas_.height : canvas_.width) - 1));
  }
  void operator()(const Warp& a) {
    const auto [x, y] = project(a.to_result, x_, y_);
    x_ = x;
    y_ = y;
  }
  template <typename Other>
  void operator()(const Other&) {}

 private:
  const Canvas& canvas_;
  float &x_, &y_;
};

void follow(Canvas& canvas, const Action& action) {
  std::visit([&canvas](const auto& a) { canvas.after(a); }, action);
}

bool finite(const Row& row) {
  return std::all_of(row.begin(), row.end(), [](float v) { return std::isfinite(v); });
}

// Why a box is none; empty if it is one.
std::string fault_of(const Row& row, BoxFormat format) {
  if (!finite(row)) return "has a coordinate that is NaN or infinite";
  const bool corners = format == BoxFormat::xyxy;
  for (size_t i = 2; i < 4; ++i) {
    const float size = corners ? row[i] - row[i - 2] : row[i];
    if (size < 0) return "has a size of " + std::to_string(size);
  }
  return {};
}

Error bad(const char* what, size_t row, const std::string& fault, const char* remedy) {
  return Error(ErrorKind::corruption,
               std::string(what) + " " + std::to_string(row) + " " + fault + remedy);
}
constexpr const char* kMend = ": mend it, or add SanitizeBoundingBoxes";

}  // namespace

std::optional<Error> move_boxes(const Drawing& drawing, bool sanitizes, Boxes& boxes) {
  const size_t rows = boxes.rows.size() / 4;
  if (boxes.rows.size() % 4 != 0 || boxes.out.size() < boxes.rows.size() ||
      (!boxes.kept.empty() && boxes.kept.size() < rows)) {
    return Error(ErrorKind::usage, "boxes: " + std::to_string(boxes.rows.size()) +
                                       " coordinates, which must be 4 a box, with a place for "
                                       "each in the result");
  }
  boxes.count = 0;
  const Canvas start(drawing);
  const auto out_width = static_cast<float>(drawing.width);
  const auto out_height = static_cast<float>(drawing.height);
  for (size_t i = 0; i < rows; ++i) {
    Row row;
    std::copy_n(&boxes.rows[4 * i], 4, row.begin());
    if (const std::string fault = fault_of(row, boxes.format); !fault.empty()) {
      if (!sanitizes) return bad("box", i, fault, kMend);
      row.fill(std::numeric_limits<float>::quiet_NaN());
    }
    if (boxes.normalised) {
      row = {row[0] * start.width, row[1] * start.height, row[2] * start.width,
             row[3] * start.height};
    }
    Canvas canvas = start;
    bool stays = true;
    for (const Action& action : drawing.actions) {
      stays = stays && std::visit(BoxMover(canvas, boxes.format, row), action);
      follow(canvas, action);
    }
    if (!stays) continue;
    if (!finite(row)) return bad("box", i, "has no place behind the transforms", kMend);
    if (boxes.normalised) {
      row = {row[0] / out_width, row[1] / out_height, row[2] / out_width, row[3] / out_height};
    }
    std::copy_n(row.begin(), 4, &boxes.out[4 * boxes.count]);
    if (!boxes.kept.empty()) boxes.kept[boxes.count] = static_cast<uint32_t>(i);
    ++boxes.count;
  }
  return std::nullopt;
}

std::optional<Error> move_keypoints(const Drawing& drawing, const Keypoints& keypoints) {
  const size_t columns = keypoints.columns;
  if ((columns != 2 && columns != 3) || keypoints.rows.size() % columns != 0 ||
      keypoints.out.size() < keypoints.rows.size()) {
    return Error(ErrorKind::usage, "keypoints: " + std::to_string(keypoints.rows.size()) +
                                       " numbers, which must be 2 or 3 a point, with a place for "
                                       "each in the result");
  }
  const Canvas start(drawing);
  const auto out_width = static_cast<float>(drawing.width);
  const auto out_height = static_cast<float>(drawing.height);
  for (size_t i = 0; i < keypoints.rows.size(); i += columns) {
    float x = keypoints.rows[i], y = keypoints.rows[i + 1];
    if (!std::isfinite(x) || !std::isfinite(y)) {
      return bad("keypoint", i / columns, "has a coordinate that is NaN or infinite",
                 ": mend it, or give it visibility 0 and a place");
    }
    if (keypoints.normalised) {
      x *= start.width;
      y *= start.height;
    }
    Canvas canvas = start;
    for (const Action& action : drawing.actions) {
      std::visit(PointMover(canvas, x, y), action);
      follow(canvas, action);
    }
    const bool seen = x >= 0 && x < out_width && y >= 0 && y < out_height;
    keypoints.out[i] = keypoints.normalised ? x / out_width : x;
    keypoints.out[i + 1] = keypoints.normalised ? y / out_height : y;
    if (columns == 3) keypoints.out[i + 2] = seen ? keypoints.rows[i + 2] : 0;
  }
  return std::nullopt;
}

}  // namespace nostall::image
