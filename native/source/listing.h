// source/listing.h - a complete sample index as one block of memory, of which a node needs one copy.
//
// The block, in the machine's own byte order and aligned to 8 bytes, holds no addresses: the number
// of samples, the ends of their paths (n + 1), their sizes, their labels, and the paths.
// Thread-safety: all methods.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/shareable.h"
#include "source/index.h"

namespace nostall::source {

class Listing {
 public:
  explicit Listing(SampleIndex index);

  uint64_t size() const noexcept { return sizes_.size(); }
  // Relative to the root, or absolute for file lists.
  std::string_view path(uint64_t sample) const noexcept {
    return {names_ + ends_[sample], static_cast<size_t>(ends_[sample + 1] - ends_[sample])};
  }
  std::span<const uint64_t> sizes() const noexcept { return sizes_; }
  std::span<const int64_t> labels() const noexcept { return labels_; }
  uint64_t total_bytes() const noexcept { return total_bytes_; }
  uint64_t fingerprint() const noexcept { return fingerprint_; }
  const std::vector<std::string>& classes() const noexcept { return classes_; }
  const std::vector<ListedDirectory>& directories() const noexcept { return directories_; }

  Shareable& block() const noexcept { return *block_; }

 private:
  std::vector<std::string> classes_;
  std::vector<ListedDirectory> directories_;
  uint64_t total_bytes_, fingerprint_;
  std::unique_ptr<Shareable> block_;
  std::span<const uint64_t> sizes_;
  std::span<const int64_t> labels_;
  const uint64_t* ends_ = nullptr;
  const char* names_ = nullptr;
};

}  // namespace nostall::source
