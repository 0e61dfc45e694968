// simulate/held.h - what the nodes hold where each keeps what it reads and makes room by what it needs
// last: Belady's rule, which drops no sample that no other node holds.
//
// Thread-safety: none. Cost: 4 bytes per access, 5 per node and sample; O(log samples) per access, and
// O(nodes) where a node has no room for an only copy.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "simulate/accesses.h"
#include "simulate/model.h"

namespace nostall::simulate {

class Held {
 public:
  // `accesses` and `sizes` (MB) outlive this.
  Held(const Accesses& accesses, std::span<const double> sizes, const Model& model);

  struct Copy {
    uint32_t node;
    size_t storage_class;  // from 1 on
  };
  // The copy that the node reads: its own one, else one of the fastest class of any other node.
  std::optional<Copy> copy_for(uint32_t node, uint32_t sample) const;

  // The node makes its access of that number. The copy that is kept because of it: on the node, or,
  // where it is the only one and does not fit there, on another.
  std::optional<Copy> read(uint32_t node, uint64_t access);

 private:
  struct Node {
    std::vector<uint8_t> storage_class;  // [sample]: 0 for none
    std::vector<uint32_t> next_use;      // [sample]: the node's next access of it
    std::vector<double> left;            // [class - 1], MB
    // [class - 1]: next use and sample of the copies that another node has too.
    std::vector<std::set<std::pair<uint32_t, uint32_t>>> spare;
  };
  // The only copy, on the node or, if that has no room, on another.
  std::optional<Copy> keep_first(uint32_t node, uint32_t sample);
  std::optional<Copy> keep_spare(uint32_t node, uint32_t sample);
  // A class with room for so many MB, after spare copies that are not needed before `until` have gone.
  std::optional<size_t> make_room(uint32_t node, double mb, uint32_t until);
  void add(const Copy& copy, uint32_t sample);
  void drop(uint32_t node, uint32_t sample);
  std::set<std::pair<uint32_t, uint32_t>>& spare(uint32_t node, uint32_t sample);
  std::pair<uint32_t, uint32_t> key(uint32_t node, uint32_t sample) const;

  const Accesses& accesses_;
  const std::span<const double> sizes_;
  std::vector<std::vector<uint32_t>> next_use_;  // [node][access]: its next access of the sample
  std::vector<Node> nodes_;
  std::vector<std::vector<uint32_t>> holders_;  // [sample]
};

}  // namespace nostall::simulate
