// records/lmdb/page.h - private to the scan: the bytes of one page, looked at with every bound
// checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "records/lmdb.h"

namespace nostall::records::lmdb {

enum PageFlags : uint16_t {
  kBranch = 0x01,
  kLeaf = 0x02,
  kOverflow = 0x04,
  kMeta = 0x08,
  kDirty = 0x10,
  kLeaf2 = 0x20,
  kSubPage = 0x40,
};
enum NodeFlags : uint16_t { kBigData = 0x01, kSubData = 0x02, kDupData = 0x04 };

template <typename T>
T number_at(std::span<const std::byte> bytes, size_t at) noexcept {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t{uint8_t(bytes[at + i])} << (8 * i);
  return static_cast<T>(value);
}

struct Node {
  size_t begin = 0, end = 0;  // in the page
  uint16_t flags = 0;
  std::string_view key;
  uint64_t child = 0;   // of a branch node
  uint64_t length = 0;  // of a leaf node's value
  size_t data_at = 0;   // where its data starts in the page
};

// A branch or leaf page. All members are total.
class Page {
 public:
  explicit Page(std::span<const std::byte> bytes) : bytes_(bytes) {}

  uint64_t number() const noexcept { return number_at<uint64_t>(bytes_, 0); }
  uint16_t flags() const noexcept { return number_at<uint16_t>(bytes_, 10); }
  // Nodes; nothing if the header contradicts itself.
  std::optional<unsigned> nodes() const noexcept;
  // The 8 bytes at `at`, which a leaf node with kBigData has inside the page.
  uint64_t word(size_t at) const noexcept { return number_at<uint64_t>(bytes_, at); }
  // Node i; nothing if it does not lie inside the page.
  std::optional<Node> node(unsigned i) const noexcept;
  // The kTreeBytes at `at`, which a leaf node with kSubData and without kBigData has inside the page.
  Tree tree(size_t at) const noexcept;

 private:
  std::span<const std::byte> bytes_;
};

inline constexpr uint16_t kMaxDepth = 32;  // LMDB's own cursor stack
// The 48 bytes that describe a tree.
inline constexpr size_t kTreeBytes = 48;
Tree tree_at(std::span<const std::byte> bytes, size_t at) noexcept;

}  // namespace nostall::records::lmdb
