// The meta pages: which transaction is the last one, and where its trees are.
#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "records/lmdb/page.h"

namespace nostall::records::lmdb {
namespace {

constexpr uint32_t kMagic = 0xBEEFC0DE;
constexpr size_t kMetaAt = kPageHeader;  // in the page
constexpr size_t kMetaBytes = 136, kPageSizeAt = 24, kTransactionAt = 128;
constexpr size_t kLaterMetaAt = 24;  // where LMDB 1.0 has it, behind a longer page header
constexpr uint32_t kLeastPage = 256, kMostPage = 65536;

struct Candidate {
  std::optional<Snapshot> snapshot;
  std::string why;       // it cannot be used
  bool refused = false;  // sound, but of a kind that is not read
};

bool tree_fits(const Tree& t, uint64_t last_page) {
  if (t.root == kNoPage) return t.entries == 0 && t.depth == 0;
  return t.root <= last_page && t.depth >= 1 && t.depth <= kMaxDepth;
}

Candidate examine(std::span<const std::byte> page, uint64_t number) {
  Candidate c;
  const auto fail = [&](std::string why) {
    c.why = std::move(why);
    return c;
  };
  if (page.size() < kMetaAt + kMetaBytes) return fail("it is cut off");
  size_t magic_at = kMetaAt;
  if (number_at<uint32_t>(page, magic_at) != kMagic) magic_at = kLaterMetaAt;
  if (number_at<uint32_t>(page, magic_at) != kMagic) return fail("wrong magic");
  const uint32_t version = number_at<uint32_t>(page, magic_at + 4) & 0xffff;
  if (version != 1 || magic_at != kMetaAt) {
    c.refused = true;
    return fail("data version " + std::to_string(version) +
                (version == 2 || version == 3 ? " (LMDB 1.0)" : "") +
                ", but version 1 (LMDB 0.9) is what can be read: copy it with that release's "
                "mdb_dump and mdb_load of LMDB 0.9");
  }
  if (number_at<uint64_t>(page, 0) != number || !(number_at<uint16_t>(page, 10) & kMeta)) {
    return fail("wrong page header");
  }
  Snapshot s;
  s.page_size = number_at<uint32_t>(page, kMetaAt + kPageSizeAt);
  s.free = tree_at(page, kMetaAt + 24);
  s.main = tree_at(page, kMetaAt + 24 + kTreeBytes);
  s.last_page = number_at<uint64_t>(page, kMetaAt + 120);
  s.transaction = number_at<uint64_t>(page, kMetaAt + kTransactionAt);
  if (!std::has_single_bit(s.page_size) || s.page_size < kLeastPage || s.page_size > kMostPage) {
    return fail("page size " + std::to_string(s.page_size));
  }
  if (s.last_page < 1 || s.last_page >= (uint64_t{1} << 48)) {
    return fail("last page " + std::to_string(s.last_page));
  }
  if (!tree_fits(s.main, s.last_page) || !tree_fits(s.free, s.last_page)) {
    return fail("its root page or depth cannot be");
  }
  c.snapshot = s;
  return c;
}

}  // namespace

Result<Snapshot> read_snapshot(RangeReader& reader, const Storage& storage) {
  const StorageFile& file = storage.files()[0];
  const auto broken = [&](const std::string& what) {
    return Error(ErrorKind::corruption, file.path + " is no sound LMDB database: " + what);
  };
  const uint64_t head = std::min<uint64_t>(file.size, 2 * kMostPage);
  if (head < kMetaAt + kMetaBytes)
    return broken("it is only " + std::to_string(head) + " bytes long");
  // Both meta pages, whatever the page size is: only they have it.
  std::vector<std::byte> bytes(std::min<uint64_t>(head, 8192));
  const auto fetch = [&](uint64_t size) -> std::optional<Error> {
    bytes.resize(size);
    try {
      read_range(reader, storage, 0, 0, bytes);
    } catch (const Error& e) {
      return e;
    }
    return {};
  };
  if (const auto error = fetch(bytes.size())) return *error;
  const Candidate first = examine(bytes, 0);
  Candidate second;
  const auto look_at = [&](uint32_t size) -> std::optional<Error> {
    if (bytes.size() < size + kMetaAt + kMetaBytes) {
      const uint64_t wanted = std::min<uint64_t>(head, size + kLeastPage);
      if (wanted > bytes.size()) {
        if (const auto error = fetch(wanted)) return error;
      }
    }
    if (bytes.size() > size) second = examine(std::span(bytes).subspan(size), 1);
    if (second.snapshot && second.snapshot->page_size != size) {
      second.snapshot.reset();
      second.why = "page size " + std::to_string(size) + " contradicts the first one";
    }
    return {};
  };
  if (first.snapshot) {
    if (const auto error = look_at(first.snapshot->page_size)) return *error;
  } else {
    for (uint32_t size = kLeastPage; size <= kMostPage && !second.snapshot; size *= 2) {
      if (const auto error = look_at(size)) return *error;
    }
  }
  if (first.refused || (second.refused && !first.snapshot)) {
    return Error(ErrorKind::usage, file.path + " has " + (first.refused ? first : second).why);
  }
  const bool take_second = second.snapshot && (!first.snapshot || second.snapshot->transaction >
                                                                      first.snapshot->transaction);
  if (!first.snapshot && !second.snapshot) {
    return broken("neither meta page can be used (" + first.why + ")");
  }
  Snapshot s = take_second ? *second.snapshot : *first.snapshot;
  s.other_meta_used = !first.snapshot || !second.snapshot;
  s.allocated = s.last_page + 1;
  s.last_page = std::min(s.last_page, std::max<uint64_t>(1, file.size / s.page_size) - 1);
  return s;
}

std::optional<uint64_t> newest_transaction(const Storage& storage) {
  std::array<std::byte, kMetaAt + kMetaBytes> first{};
  std::array<std::byte, sizeof(uint64_t)> second{};
  if (!storage.peek(0, 0, first)) return std::nullopt;
  const auto page_size = number_at<uint32_t>(first, kMetaAt + kPageSizeAt);
  if (!storage.peek(0, uint64_t{page_size} + kMetaAt + kTransactionAt, second)) return std::nullopt;
  return std::max(number_at<uint64_t>(first, kMetaAt + kTransactionAt),
                  number_at<uint64_t>(second, 0));
}

}  // namespace nostall::records::lmdb
