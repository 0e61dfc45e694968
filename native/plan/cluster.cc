// Turns ownership into access frequencies, so that place() can stay one rule: an owned sample gets
// a frequency above all others, and a sample of another node that is read once gets none.
#include "plan/cluster.h"

#include <algorithm>

namespace nostall::plan {

NodeAccess cluster_access(const Ownership& ownership, uint32_t node, NodeAccess own) {
  const uint32_t above_all = 1 + *std::max_element(own.frequency.begin(), own.frequency.end());
  for (SampleId s = 0; s < own.frequency.size(); ++s) {
    if (ownership.owner[s] == node) {
      own.frequency[s] += above_all;
      own.first_access[s] = ownership.first_access[s];
    } else if (ownership.owner[s] != kNoOwner && own.frequency[s] < 2) {
      own.frequency[s] = 0;  // a copy that is never read again
    }
  }
  return own;
}

}  // namespace nostall::plan
