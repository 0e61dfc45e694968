// collective/selection.h - which algorithm an allreduce takes, from a table that was measured.
//
// `nostall calibrate collectives` writes the table (docs/formats/collectives.md): for numbers of
// ranks, sizes of message, and balanced or imbalanced arrivals, the algorithm that was fastest.
// Without a table all is `cooperative`.
//
// The imbalance is measured while running, on one rank, from the times of all arrivals; the others
// read its finding in shared memory. A finding of call c counts from call c + 2: a rank that has
// arrived there has finished c + 1, which needed what that rank wrote before, so that all choose
// the same without a message. Thread-safety: immutable; Phase belongs to one thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "collective/shared_memory.h"
#include "collective/types.h"

namespace nostall::collective {

class Selection {
 public:
  Selection() = default;
  // Of the table's text, the rows for so many ranks: those of the largest number measured that is
  // not above. Throws Error(usage) that names what it cannot read.
  Selection(std::string_view json, uint32_t ranks);

  bool empty() const noexcept { return rows_.empty(); }
  Algorithm choose(uint64_t bytes, bool imbalanced) const noexcept;
  // The same on ranks that choose the same; 0 without a table.
  uint64_t hash() const noexcept;

 private:
  struct Row {
    uint32_t ranks;
    bool imbalanced;
    uint64_t up_to;  // bytes
    Algorithm algorithm;
  };
  std::vector<Row> rows_;  // by up_to
};

// The text of the file `named` (what NOSTALL_COLLECTIVES says); if that is empty, of
// collectives.json of the user's cache, if it is there. Empty for "off". Throws Error(io) if the
// file that is named cannot be read.
std::string selection_text(std::string_view named);

// Whether arrivals are imbalanced, as seen by all of them at the same call.
class Phase {
 public:
  Phase(SharedMemory& memory, uint32_t rank, uint32_t ranks)
      : shared_(memory), rank_(rank), ranks_(ranks) {}

  // At this rank's arrival at the next call.
  bool arrive(int64_t now) noexcept;
  // After it, when all have arrived.
  void leave(int64_t now) noexcept;

 private:
  // So many more calls of one kind than of the other change the finding.
  static constexpr int kCertain = 8;

  SharedMemory& shared_;
  const uint32_t rank_, ranks_;
  uint64_t call_ = 0;
  int balance_ = 0;
};

}  // namespace nostall::collective
