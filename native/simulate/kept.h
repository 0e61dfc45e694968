// simulate/kept.h - which node holds which sample in which storage class, and since when.
//
// Thread-safety: none. Cost: 16 bytes per kept copy, 12 per sample and class; look-ups of a node's
// own copies are a binary search.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "simulate/decision.h"

namespace nostall::simulate {

inline constexpr double kNotYet = std::numeric_limits<double>::infinity();

class Kept {
 public:
  // Throws Error(usage) if the decision keeps samples, nodes or classes that there are not, or one
  // sample twice on one node.
  Kept(const Decision& decision, uint64_t samples, uint32_t nodes, size_t classes);

  struct Copy {
    size_t storage_class;  // from 1 on
    double since;          // kNotYet: will be kept, is not there
    uint64_t slot;         // for fill and drop
  };
  // The node's own copy, there or to come.
  std::optional<Copy> own(uint32_t node, uint32_t sample) const;

  struct Remote {
    size_t storage_class;
    uint32_t node;
    double since;
  };
  // The fastest class of any node that holds the sample at `time`; at kNotYet: that will hold it,
  // by the calls of fill so far.
  std::optional<Remote> remote(uint32_t sample, double time) const;

  void fill(uint32_t node, uint32_t sample, const Copy& copy, double time);
  void drop(uint32_t node, uint32_t sample, const Copy& copy);

 private:
  struct Shelf {
    std::vector<uint32_t> samples;  // ascending
    std::vector<uint8_t> storage_class;
    std::vector<double> since;
  };
  struct First {
    double since = kNotYet;
    uint32_t node = 0;
  };
  std::vector<Shelf> shelves_;
  std::vector<std::vector<First>> first_;  // [class - 1][sample]: the copy that was there first
};

}  // namespace nostall::simulate
