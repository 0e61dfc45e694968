// The same formulas in the same order as torchvision's, so that results round alike.
#include "image/projection.h"

#include <cmath>
#include <numbers>
#include <utility>

namespace nostall::image {
namespace {

double radians(double degrees) { return degrees * (std::numbers::pi / 180.0); }

// torchvision's _get_inverse_affine_matrix.
Projection affine_matrix(const Affine& affine, Point center, bool inverted) {
  const double rotation = radians(affine.angle);
  const double sx = radians(affine.shear[0]), sy = radians(affine.shear[1]);
  const double tan_sx = std::tan(sx), cos_sy = std::cos(sy);
  const double x = center[0] + affine.translate[0], y = center[1] + affine.translate[1];
  const double a = std::cos(rotation - sy) / cos_sy;
  const double b = -(a * tan_sx + std::sin(rotation));
  const double c = std::sin(rotation - sy) / cos_sy;
  const double d = std::cos(rotation) - c * tan_sx;
  const double s = affine.scale;
  if (inverted) {
    Projection m{d / s, -b / s, 0, -c / s, a / s, 0, 0, 0};
    m[2] += center[0] - m[0] * x - m[1] * y;
    m[5] += center[1] - m[3] * x - m[4] * y;
    return m;
  }
  Projection m{a * s, b * s, 0, c * s, d * s, 0, 0, 0};
  m[2] += x - m[0] * center[0] - m[1] * center[1];
  m[5] += y - m[3] * center[0] - m[4] * center[1];
  return m;
}

// Python's round(value, 15).
double rounded(double value) { return std::nearbyint(value * 1e15) / 1e15; }

// Gauss with pivots: the eight unknowns of eight equations. False if there is no one answer.
bool solve(std::array<std::array<double, 9>, 8>& rows, Projection& unknowns) {
  for (size_t column = 0; column < 8; ++column) {
    size_t pivot = column;
    for (size_t row = column + 1; row < 8; ++row) {
      if (std::abs(rows[row][column]) > std::abs(rows[pivot][column])) pivot = row;
    }
    if (std::abs(rows[pivot][column]) < 1e-9) return false;
    std::swap(rows[column], rows[pivot]);
    for (size_t row = 0; row < 8; ++row) {
      if (row == column) continue;
      const double factor = rows[row][column] / rows[column][column];
      for (size_t k = column; k < 9; ++k) rows[row][k] -= factor * rows[column][k];
    }
  }
  for (size_t i = 0; i < 8; ++i) unknowns[i] = rows[i][8] / rows[i][i];
  return true;
}

}  // namespace

Warp affine_warp(const Affine& affine, Point center) {
  Warp warp;
  warp.to_source = affine_matrix(affine, center, true);
  warp.to_result = affine_matrix(affine, center, false);
  return warp;
}

Warp rotation_warp(double angle, Point center) {
  const double turn = -radians(std::fmod(std::fmod(angle, 360.0) + 360.0, 360.0));
  Projection m{rounded(std::cos(turn)),
               rounded(std::sin(turn)),
               0,
               rounded(-std::sin(turn)),
               rounded(std::cos(turn)),
               0,
               0,
               0};
  m[2] = m[0] * -center[0] + m[1] * -center[1] + center[0];
  m[5] = m[3] * -center[0] + m[4] * -center[1] + center[1];
  Warp warp;
  warp.to_source = m;
  warp.to_result = affine_matrix({-angle, {}, 1, {}}, center, false);
  return warp;
}

bool perspective_warp(int64_t width, int64_t height, const std::array<Point, 4>& corners,
                      Warp& warp) {
  const auto right = static_cast<double>(width - 1), bottom = static_cast<double>(height - 1);
  const Point starts[4] = {{0, 0}, {right, 0}, {right, bottom}, {0, bottom}};
  std::array<std::array<double, 9>, 8> rows{};
  for (size_t i = 0; i < 4; ++i) {
    const auto [x, y] = corners[i];
    const auto [u, v] = starts[i];
    rows[2 * i] = {x, y, 1, 0, 0, 0, -u * x, -u * y, u};
    rows[2 * i + 1] = {0, 0, 0, x, y, 1, -v * x, -v * y, v};
  }
  Projection c{};
  if (!solve(rows, c)) return false;
  for (double& value : c) value = static_cast<float>(value);  // as torchvision's do
  const double scale = c[0] * c[4] - c[1] * c[3];
  if (scale == 0) return false;
  warp.to_source = c;
  warp.to_result = {(c[4] - c[5] * c[7]) / scale,         (-c[1] + c[2] * c[7]) / scale,
                    (c[1] * c[5] - c[2] * c[4]) / scale,  (-c[3] + c[5] * c[6]) / scale,
                    (c[0] - c[2] * c[6]) / scale,         (-c[0] * c[5] + c[2] * c[3]) / scale,
                    (-c[4] * c[6] + c[3] * c[7]) / scale, (-c[0] * c[7] + c[1] * c[6]) / scale};
  return true;
}

}  // namespace nostall::image
