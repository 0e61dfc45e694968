// image/color.h - colour changes of a canvas with Pillow's arithmetic, level for level.
//
// What maps a level to a level is collected in one table, and touches the pixels once.
// Thread-safety: one Colors a thread.
#pragma once

#include <array>

#include "image/draw.h"
#include "image/surface.h"

namespace nostall::image {

class Colors {
 public:
  // `other` is as large as the surface, for changes that look at neighbours.
  Colors(const Surface& surface, Buffer& other);
  void apply(const Color& action);
  void apply(const Blur& action);
  // Does what was collected. Must be the last call.
  void flush();

 private:
  using Table = std::array<uint8_t, 256>;
  // What `level(v)` gives for each level v, after what was collected so far.
  template <typename Level>
  void then(const Level& level);
  void then(const std::array<Table, 3>& tables);
  std::array<std::array<uint32_t, 256>, 3> histogram();
  void contrast(double factor);
  void autocontrast();
  void equalize();

  Surface surface_;
  Buffer& other_;
  std::array<Table, 3> tables_;
  bool pending_ = false;
};

}  // namespace nostall::image
