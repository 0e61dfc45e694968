// The lower bound on source bytes, by a sweep over epochs with Belady's rule.
#include "plan/bound.h"

#include <algorithm>
#include <vector>

namespace nostall::plan {

// A sample accessed in epochs e and f > e, and not between, can be spared the second read only if
// it is kept across every boundary between them, and each boundary holds at most `capacity` bytes.
// Serving the intervals that end first (Belady's rule, with samples cut into pieces) spares the
// most bytes.
uint64_t source_bytes_lower_bound(const JobSpec& spec, std::span<const uint64_t> sizes,
                                  uint64_t capacity, Position begin) {
  const uint32_t epochs = spec.epochs;
  std::vector<uint32_t> last(spec.samples, epochs);  // epoch of the last access, `epochs` if none
  // Free bytes at the boundary in front of each epoch.
  std::vector<uint64_t> free(epochs, capacity);
  uint64_t read = 0;
  // By the epoch in which an interval ends, longest gap last: within one end, the shortest take the
  // least from earlier boundaries.
  std::vector<uint64_t> by_start(epochs, 0);
  for (uint32_t epoch = begin.epoch; epoch < epochs; ++epoch) {
    std::fill(by_start.begin(), by_start.end(), 0);
    const std::vector<SampleId> order = epoch_order(spec, epoch);
    const uint64_t before = epoch == begin.epoch ? begin.batch * spec.global_batch : 0;
    for (const SampleId s : std::span(order).subspan(std::min<uint64_t>(before, order.size()))) {
      if (last[s] == epoch) continue;  // again in the same epoch
      if (last[s] == epochs) {
        read += sizes[s];
      } else {
        by_start[last[s]] += sizes[s];
      }
      last[s] = epoch;
    }
    for (uint32_t start = epoch; start-- > begin.epoch;) {
      uint64_t bytes = by_start[start];
      if (bytes == 0) continue;
      uint64_t room = bytes;
      for (uint32_t boundary = start + 1; boundary <= epoch; ++boundary) {
        room = std::min(room, free[boundary]);
      }
      for (uint32_t boundary = start + 1; boundary <= epoch; ++boundary) free[boundary] -= room;
      read += bytes - room;
    }
  }
  return read;
}

}  // namespace nostall::plan
