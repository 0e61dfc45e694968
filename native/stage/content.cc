// Compares bytes of every origin with the checksums of those that were read first (base/sums.h).
#include "stage/content.h"

#include <new>

#include "base/log.h"
#include "source/sums.h"
#include "stage/run.h"

namespace nostall::stage {

void compare(const source::Source& source, SampleSums& sums,
             std::span<source::ReadRequest> requests, source::Reader& reader,
             std::atomic<bool>& warned) {
  for (source::ReadRequest& r : requests) {
    if (r.error != 0 || sums.agrees(r.sample, r.into)) continue;
    // Read again: damage on the way is not another content.
    reader.read({&r, 1});
    if (r.error != 0) continue;
    const uint32_t now = sample_sum(r.into);
    if (sums.agrees(r.sample, now)) {
      if (!warned.exchange(true)) {
        log(LogLevel::warning, source.describe(r.sample) +
                                   " was read with wrong bytes, and with the right ones at a "
                                   "second reading: check storage and memory of this machine");
      }
      continue;
    }
    r.error = source::kWrongBytes;
    r.why = source::changed_text(source, r.sample, sums.of(r.sample), now);
  }
}

void Loader::Run::compare(std::span<source::ReadRequest> requests, source::Reader& reader) {
  stage::compare(*config_.source, sums_, requests, reader, warned_of_reading_);
}

std::span<const std::byte> Loader::Run::checked_view(Task::Item& item, source::Reader& reader,
                                                     tier::RamView& view) {
  const uint64_t size = sizes_[item.sample];
  if (item.raw) return {item.raw->data(), size};
  view = config_.cache->ram_view(item.entry);
  if (view) {
    if (sums_.agrees(item.sample, view.bytes())) return view.bytes();
    config_.cache->reject(item.entry);
  }  // else its memory was given back since it was looked at
  source::ReadRequest request{item.sample, {}};
  try {
    item.raw = raw_pool_->take(size);
    request.into = {item.raw->data(), size};
    reader.read({&request, 1});
  } catch (const std::bad_alloc&) {
    request.error = ENOMEM;
  }
  compare({&request, 1}, reader);
  own_bytes_ += size;
  item.read_error = request.error;
  if (request.error == 0) return request.into;
  item.read_why = source::read_error_text(request);
  return {};
}

}  // namespace nostall::stage
