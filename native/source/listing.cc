// The block is laid out once, from arrays that grew; its parts are then plain pointers into it.
#include "source/listing.h"

#include <cstring>
#include <utility>

namespace nostall::source {

Listing::Listing(SampleIndex index)
    : classes_(index.classes()),
      directories_(index.directories()),
      total_bytes_(index.total_bytes()),
      fingerprint_(index.fingerprint()) {
  const uint64_t n = index.size();
  const std::string_view names = index.names();
  block_ = std::make_unique<Shareable>((1 + (n + 1) + 2 * n) * sizeof(uint64_t) + names.size());
  std::byte* at = block_->data();
  const auto put = [&at](const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(at, from, bytes);
    return std::exchange(at, at + bytes);
  };
  put(&n, sizeof n);
  ends_ = reinterpret_cast<const uint64_t*>(put(index.ends().data(), (n + 1) * sizeof(uint64_t)));
  const auto* sizes = put(index.sizes().data(), n * sizeof(uint64_t));
  const auto* labels = put(index.labels().data(), n * sizeof(int64_t));
  sizes_ = {reinterpret_cast<const uint64_t*>(sizes), static_cast<size_t>(n)};
  labels_ = {reinterpret_cast<const int64_t*>(labels), static_cast<size_t>(n)};
  names_ = reinterpret_cast<const char*>(put(names.data(), names.size()));
}

}  // namespace nostall::source
