// Turns ownership into access frequencies, so that place() can stay one rule: an owned sample gets
// a frequency above all others, and a sample of another node that is read once gets none.
#include "plan/cluster.h"

namespace nostall::plan {

NodeAccess cluster_access(const JobSpec& spec, const Ownership& ownership, uint32_t node,
                          NodeAccess own) {
  // No node reads a sample this often by chance alone: every rank once in every epoch.
  const uint32_t above_all = spec.epochs * spec.world + 1;
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
