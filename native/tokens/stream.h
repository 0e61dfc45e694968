// tokens/stream.h - token ids of a data set as one stream, and where its documents begin. Read this
// first.
//
// A Stream is the ids of a few or of thousands of files, one file after the other, each id `width`
// bytes, unsigned or signed, little-endian. Documents divide it; the first one begins at token 0.
// Files are read by ranges (records/ranges.h), local ones and objects alike, and never mapped.
// An Index is what opening the files finds: their extents and documents. It has a stored form
// (docs/formats/tokens.md); parse_index is total.
// Thread-safety: values and immutable objects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/shareable.h"
#include "records/ranges.h"

namespace nostall::tokens {

inline constexpr uint32_t kTokensMagic = 0x54534e31;  // "1NST"
inline constexpr uint32_t kTokensVersion = 1;
inline constexpr uint64_t kMostTokens = uint64_t{1} << 48;          // of a stream
inline constexpr uint64_t kMostDocument = (uint64_t{1} << 32) - 1;  // tokens of a document

// Where each document begins: four bytes a document, the low half of its first token's number, and
// how many documents begin before each multiple of 2^32.
class Documents {
 public:
  // Throws Error(corruption) if that is no division of `tokens` tokens: a first document that does
  // not begin at 0, others that begin before the one before, or one of 2^32 tokens.
  // `low`: of the low halves, four bytes each; null if there are none.
  Documents(std::unique_ptr<Shareable> low, std::vector<uint64_t> blocks, uint64_t tokens);
  // From whole numbers.
  static Documents of(std::span<const uint64_t> begins, uint64_t tokens);

  uint64_t size() const noexcept { return low_.size(); }
  uint64_t tokens() const noexcept { return tokens_; }
  uint64_t begin(uint64_t i) const noexcept;
  uint64_t end(uint64_t i) const noexcept { return i + 1 < size() ? begin(i + 1) : tokens_; }
  uint32_t length(uint64_t i) const noexcept { return static_cast<uint32_t>(end(i) - begin(i)); }
  // Soon to be asked for.
  void prefetch(uint64_t i) const noexcept { __builtin_prefetch(low_.data() + i); }
  // The last document that begins at `token` or before it.
  uint64_t at(uint64_t token) const noexcept;

  std::span<const uint32_t> low() const noexcept { return low_; }
  std::span<const uint64_t> blocks() const noexcept { return blocks_; }
  // Equal for equal documents.
  uint64_t fingerprint() const noexcept { return fingerprint_; }
  // What a node needs once; null if there are no documents.
  Shareable* shareable() const noexcept { return block_.get(); }

 private:
  // Where the last one begins; throws for the first one that cannot be.
  uint64_t check_each() const;

  std::unique_ptr<Shareable> block_;
  std::span<const uint32_t> low_;
  std::vector<uint64_t> blocks_;  // (tokens >> 32) + 2 of them, the last one size()
  uint64_t tokens_ = 0, fingerprint_ = 0;
};

// Tokens that lie one after the other in a file.
struct Extent {
  uint32_t file = 0;
  uint64_t offset = 0, tokens = 0;
};

struct Index {
  std::string stamp;  // what it depends on beside the files
  std::vector<records::StorageFile> files;
  uint32_t width = 2;           // bytes of an id: 1, 2, 4 or 8
  std::vector<Extent> extents;  // in the order of the stream
  std::shared_ptr<const Documents> documents;
};

std::vector<std::byte> serialize_index(const Index& index);
// Writes the same as source::store_index() does, without another copy of the documents: 0 or -errno,
// and the bytes.
std::pair<int, uint64_t> store_index(const std::string& path, const Index& index);
Result<Index> parse_index(std::span<const std::byte> bytes);
// An index for other processes of this release, of whose documents the node has one copy: files that
// nothing can change. Throws Error(io) if there can be none; Error(corruption) if files are no index.
std::vector<Descriptor> share_index(const Index& index);
Result<Index> shared_index(std::span<const Descriptor> files);

// Finds the documents of extents by reading them once, from up to `threads` threads: one begins with
// every extent, and behind every id that is `end`. Throws Error(corruption), with file and place, for
// an id that is not below `vocabulary`, if that is not 0.
struct Scan {
  std::optional<uint64_t> end;
  uint64_t vocabulary = 0;
};
Documents scan_documents(const records::Storage& storage, uint32_t width,
                         std::span<const Extent> extents, const Scan& scan, unsigned threads,
                         const std::function<void(uint64_t)>& progress = {});

class Stream {
 public:
  // Throws Error(corruption) if an extent does not lie inside its file.
  Stream(std::shared_ptr<const records::Storage> storage, Index index);

  uint64_t tokens() const noexcept { return begins_.back(); }
  uint32_t width() const noexcept { return index_.width; }
  const Documents& documents() const noexcept { return *index_.documents; }
  const Index& index() const noexcept { return index_; }
  const records::Storage& storage() const noexcept { return *storage_; }
  uint64_t fingerprint() const noexcept { return fingerprint_; }

  // Appends the ranges of `count` tokens from `begin` on, which exist, to `out`; they fill `into`.
  void ranges(uint64_t begin, uint64_t count, std::byte* into,
              std::vector<records::RangeRead>& out) const;
  // "tokens 0 to 4096 of /data/a.bin"
  std::string describe(uint64_t begin, uint64_t count) const;

 private:
  size_t extent_of(uint64_t token) const noexcept;

  std::shared_ptr<const records::Storage> storage_;
  Index index_;
  std::vector<uint64_t> begins_;  // the first token of each extent, then the end
  uint64_t fingerprint_ = 0;
};

}  // namespace nostall::tokens
