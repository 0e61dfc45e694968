// Reads one LMDB page: offsets of nodes, keys and values, each checked against the page's bounds.
#include "records/lmdb/page.h"

namespace nostall::records::lmdb {
namespace {

constexpr size_t kNodeHeader = 8;

}  // namespace

std::optional<unsigned> Page::nodes() const noexcept {
  const auto lower = number_at<uint16_t>(bytes_, 12), upper = number_at<uint16_t>(bytes_, 14);
  if (lower < kPageHeader || lower % 2 != 0 || lower > upper || upper > bytes_.size()) return {};
  return (lower - kPageHeader) / 2;
}

std::optional<Node> Page::node(unsigned i) const noexcept {
  const auto upper = number_at<uint16_t>(bytes_, 14);
  const auto at = number_at<uint16_t>(bytes_, kPageHeader + 2 * size_t{i});
  if (at < upper || at + kNodeHeader > bytes_.size()) return {};
  const auto low = number_at<uint16_t>(bytes_, at), high = number_at<uint16_t>(bytes_, at + 2u);
  const auto key_size = number_at<uint16_t>(bytes_, at + 6u);
  Node n;
  n.begin = at;
  n.flags = number_at<uint16_t>(bytes_, at + 4u);
  n.data_at = at + kNodeHeader + key_size;
  if (n.data_at > bytes_.size()) return {};
  n.key = {reinterpret_cast<const char*>(bytes_.data()) + at + kNodeHeader, key_size};
  if (flags() & kBranch) {
    n.end = n.data_at;
    n.child = uint64_t{low} | uint64_t{high} << 16 | uint64_t{n.flags} << 32;
    return n;
  }
  n.length = uint64_t{low} | uint64_t{high} << 16;
  const uint64_t stored = n.flags & kBigData ? 8 : n.length;
  if (stored > bytes_.size() - n.data_at) return {};
  n.end = n.data_at + stored;
  return n;
}

Tree Page::tree(size_t at) const noexcept { return tree_at(bytes_, at); }

Tree tree_at(std::span<const std::byte> b, size_t at) noexcept {
  Tree t;
  t.flags = number_at<uint16_t>(b, at + 4);
  t.depth = number_at<uint16_t>(b, at + 6);
  t.branch_pages = number_at<uint64_t>(b, at + 8);
  t.leaf_pages = number_at<uint64_t>(b, at + 16);
  t.overflow_pages = number_at<uint64_t>(b, at + 24);
  t.entries = number_at<uint64_t>(b, at + 32);
  t.root = number_at<uint64_t>(b, at + 40);
  return t;
}

}  // namespace nostall::records::lmdb
