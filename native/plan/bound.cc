// The lower bound on source bytes, by a sweep over epochs with Belady's rule.
#include "plan/bound.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

namespace nostall::plan {

// A sample accessed in epochs e and f > e, and not between, can be spared the second read only if
// it is kept across every boundary between them, and each boundary holds at most `capacity` bytes.
// Serving the intervals that end first (Belady's rule, with samples cut into pieces) spares the
// most bytes. Epochs are counted as they come in `epochs`.
uint64_t source_bytes_lower_bound(const JobSpec& spec, std::span<const uint64_t> sizes,
                                  uint64_t capacity, Position begin,
                                  std::span<const uint32_t> epochs) {
  const auto count = static_cast<uint32_t>(epochs.size());
  std::vector<uint32_t> last(spec.samples, count);  // epoch of the last access, `count` if none
  // Free bytes at the boundary in front of each epoch.
  std::vector<uint64_t> free(count, capacity);
  uint64_t read = 0;
  // By the epoch in which an interval begins, its bytes; `starts`: where these are not 0.
  std::vector<uint64_t> by_start(count, 0);
  std::vector<uint32_t> starts;
  for (uint32_t epoch = 0; epoch < count; ++epoch) {
    const std::vector<SampleId> order = epoch_order(spec, epochs[epoch]);
    const uint64_t before = epochs[epoch] == begin.epoch ? begin.batch * spec.global_batch : 0;
    for (const SampleId s : std::span(order).subspan(std::min<uint64_t>(before, order.size()))) {
      if (last[s] == epoch || sizes[s] == 0) continue;  // again in the same epoch
      if (last[s] == count) {
        read += sizes[s];
      } else {
        if (by_start[last[s]] == 0) starts.push_back(last[s]);
        by_start[last[s]] += sizes[s];
      }
      last[s] = epoch;
    }
    // Longest gap last: within one end, the shortest take the least from earlier boundaries.
    std::ranges::sort(starts, std::greater());
    for (const uint32_t start : starts) {
      const uint64_t bytes = std::exchange(by_start[start], 0);
      uint64_t room = bytes;
      for (uint32_t boundary = epoch; room > 0 && boundary > start; --boundary) {
        room = std::min(room, free[boundary]);
      }
      for (uint32_t boundary = epoch; room > 0 && boundary > start; --boundary) {
        free[boundary] -= room;
      }
      read += bytes - room;
    }
    starts.clear();
  }
  return read;
}

uint64_t source_bytes_lower_bound(const JobSpec& spec, std::span<const uint64_t> sizes,
                                  uint64_t capacity, Position begin) {
  std::vector<uint32_t> epochs(spec.epochs - std::min(begin.epoch, spec.epochs));
  std::iota(epochs.begin(), epochs.end(), begin.epoch);
  return source_bytes_lower_bound(spec, sizes, capacity, begin, epochs);
}

}  // namespace nostall::plan
