// Adds each batch to the sums of its epoch, and keeps one row for each of the last batches.
#include "stage/record.h"

#include <algorithm>

namespace nostall::stage {

void Record::add(const Batch& batch, double time, double wait) {
  const MutexLock lock(mutex_);
  ++taken_.batches;
  taken_.samples += batch.samples.size();
  taken_.stall += wait;
  taken_.transform_ns += batch.transform_ns;
  for (size_t o = 0; o < kOrigins; ++o) {
    taken_.origins[o].samples += batch.origins[o].samples;
    taken_.origins[o].bytes += batch.origins[o].bytes;
    taken_.origins[o].nanoseconds += batch.origins[o].nanoseconds;
  }
  for (const Substitution& s : batch.substitutions) taken_.substituted.push_back(s.sample);
  for (uint64_t Memory::*const pool : {&Memory::ram_tier, &Memory::file_tier, &Memory::staging,
                                       &Memory::io_buffers, &Memory::decoding}) {
    most_.*pool = std::max(most_.*pool, batch.memory.*pool);
  }
  std::array<double, kColumns> row{static_cast<double>(batch.position.epoch),
                                   static_cast<double>(batch.position.batch), time, wait};
  for (size_t o = 0; o < kOrigins; ++o) row[4 + o] = static_cast<double>(batch.origins[o].samples);
  row.back() = static_cast<double>(batch.queue);
  for (size_t i = 0; i < kColumns; ++i) {
    std::vector<double>& column = columns_[i];
    column.push_back(row[i]);
    if (column.size() <= 2 * kept_) continue;
    column.erase(column.begin(), column.end() - static_cast<ptrdiff_t>(kept_));
  }
}

}  // namespace nostall::stage
