// Documents by halves of numbers, and the stream over its extents.
#include "tokens/stream.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/crc32c.h"
#include "base/fnv.h"

namespace nostall::tokens {
namespace {

constexpr uint64_t kBlock = uint64_t{1} << 32;

[[noreturn]] void damaged(const std::string& what) { throw Error(ErrorKind::corruption, what); }

// Where the last document begins, if all that Documents asks of its numbers is so; a loop without
// branches, which the compiler makes one over vectors.
std::optional<uint64_t> last_of_rising(std::span<const uint32_t> low,
                                       std::span<const uint64_t> blocks, uint64_t tokens) {
  uint64_t last = 0;
  for (uint64_t block = 0; block + 1 < blocks.size(); ++block) {
    const auto of_block = low.subspan(blocks[block], blocks[block + 1] - blocks[block]);
    if (of_block.empty()) continue;
    uint32_t falls = 0;
    for (size_t i = 1; i < of_block.size(); ++i) falls |= of_block[i] < of_block[i - 1] ? 1u : 0u;
    if (falls != 0 || block * kBlock + of_block.front() - last > kMostDocument) return {};
    last = block * kBlock + of_block.back();
  }
  if (last > tokens || (!low.empty() && (blocks[1] == 0 || low.front() != 0))) return {};
  return last;
}

}  // namespace

Documents::Documents(std::unique_ptr<Shareable> low, std::vector<uint64_t> blocks, uint64_t tokens)
    : block_(std::move(low)), blocks_(std::move(blocks)), tokens_(tokens) {
  if (tokens > kMostTokens) damaged("a stream has more than 2^48 tokens");
  if (block_) {
    low_ = {reinterpret_cast<const uint32_t*>(block_->data()), block_->size() / sizeof(uint32_t)};
  }
  if (blocks_.size() != (tokens >> 32) + 2 || blocks_.front() != 0 ||
      blocks_.back() != low_.size() || !std::is_sorted(blocks_.begin(), blocks_.end())) {
    damaged("the blocks of its documents do not go together");
  }
  if (low_.empty() && tokens != 0) damaged("its tokens are in no document");
  uint64_t last = 0;
  if (const auto known = last_of_rising(low_, blocks_, tokens)) {
    last = *known;
  } else {
    last = check_each();
  }
  if (tokens - last > kMostDocument) damaged("a document has more than 2^32 - 1 tokens");
  Fnv hash;
  hash.number(tokens).number(size()).number(crc32c(std::as_bytes(low_)));
  for (const uint64_t b : blocks_) hash.number(b);
  fingerprint_ = hash.value();
}

uint64_t Documents::check_each() const {
  uint64_t last = 0;
  for (uint64_t block = 0; block + 1 < blocks_.size(); ++block) {
    for (uint64_t i = blocks_[block]; i < blocks_[block + 1]; ++i) {
      const uint64_t begin = block * kBlock + low_[i];
      if (begin < last || begin > tokens_ || (i == 0 && begin != 0)) {
        damaged("document " + std::to_string(i) + " begins at token " + std::to_string(begin) +
                ", which cannot be: the one before begins at " + std::to_string(last) +
                ", and there are " + std::to_string(tokens_) + " tokens");
      }
      if (begin - last > kMostDocument) damaged("a document has more than 2^32 - 1 tokens");
      last = begin;
    }
  }
  return last;
}

Documents Documents::of(std::span<const uint64_t> begins, uint64_t tokens) {
  std::unique_ptr<Shareable> low;
  if (!begins.empty()) low = std::make_unique<Shareable>(begins.size() * sizeof(uint32_t));
  std::vector<uint64_t> blocks{0};
  for (size_t i = 0; i < begins.size(); ++i) {
    const uint64_t begin = begins[i];
    if (begin > tokens || begin < (blocks.size() - 1) * kBlock) {
      damaged("document " + std::to_string(i) + " begins at token " + std::to_string(begin) +
              " of " + std::to_string(tokens) +
              ", or before the one before: index and data disagree");
    }
    while (blocks.size() <= begin / kBlock) blocks.push_back(i);
    reinterpret_cast<uint32_t*>(low->data())[i] = static_cast<uint32_t>(begin);
  }
  while (blocks.size() < tokens / kBlock + 2) blocks.push_back(begins.size());
  return {std::move(low), std::move(blocks), tokens};
}

uint64_t Documents::begin(uint64_t i) const noexcept {
  if (blocks_.size() == 2) return low_[i];
  const auto block = std::upper_bound(blocks_.begin(), blocks_.end(), i) - blocks_.begin() - 1;
  return static_cast<uint64_t>(block) * kBlock + low_[i];
}

uint64_t Documents::at(uint64_t token) const noexcept {
  const uint64_t block = token / kBlock;
  const auto first = low_.begin() + static_cast<ptrdiff_t>(blocks_[block]);
  const auto end = low_.begin() + static_cast<ptrdiff_t>(blocks_[block + 1]);
  const auto behind = std::upper_bound(first, end, static_cast<uint32_t>(token));
  return static_cast<uint64_t>(behind - low_.begin()) - 1;
}

Stream::Stream(std::shared_ptr<const records::Storage> storage, Index index)
    : storage_(std::move(storage)), index_(std::move(index)) {
  const auto files = storage_->files();
  Fnv hash;
  hash.text(index_.stamp).number(index_.width).number(files.size());
  for (const records::StorageFile& f : files) {
    // The same data set may lie in another folder on another node.
    hash.text(std::string_view(f.path).substr(f.path.rfind('/') + 1)).number(f.size);
  }
  begins_.push_back(0);
  for (const Extent& e : index_.extents) {
    if (e.file >= files.size() || e.offset > files[e.file].size ||
        e.tokens > (files[e.file].size - e.offset) / index_.width) {
      damaged("its index has " + std::to_string(e.tokens) + " tokens at offset " +
              std::to_string(e.offset) + " of " +
              (e.file < files.size() ? files[e.file].path + ", which has " +
                                           std::to_string(files[e.file].size) + " bytes"
                                     : "no file") +
              ": index and data disagree, the file was cut or is another one");
    }
    hash.number(e.file).number(e.offset).number(e.tokens);
    begins_.push_back(begins_.back() + e.tokens);
  }
  if (documents().tokens() != tokens()) {
    damaged("its documents have " + std::to_string(documents().tokens()) + " tokens, its files " +
            std::to_string(tokens()) + ": index and data disagree");
  }
  fingerprint_ = hash.number(documents().fingerprint()).value();
}

size_t Stream::extent_of(uint64_t token) const noexcept {
  return static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), token) -
                             begins_.begin()) -
         1;
}

void Stream::ranges(uint64_t begin, uint64_t count, std::byte* into,
                    std::vector<records::RangeRead>& out) const {
  for (size_t i = extent_of(begin); count > 0; ++i) {
    const Extent& e = index_.extents[i];
    const uint64_t skip = begin - begins_[i];
    const uint64_t here = std::min(count, e.tokens - skip);
    if (here == 0) continue;
    records::RangeRead range;
    range.file = e.file;
    range.offset = e.offset + skip * index_.width;
    range.into = {into, static_cast<size_t>(here * index_.width)};
    into += range.into.size();
    out.push_back(std::move(range));
    begin += here;
    count -= here;
  }
}

std::string Stream::describe(uint64_t begin, uint64_t count) const {
  if (index_.extents.empty()) return "no tokens";
  const size_t i = extent_of(std::min(begin, tokens() - 1));
  const uint64_t first = begin - begins_[i];
  return "tokens " + std::to_string(first) + " to " + std::to_string(first + count) + " of " +
         storage_->files()[index_.extents[i].file].path;
}

}  // namespace nostall::tokens
