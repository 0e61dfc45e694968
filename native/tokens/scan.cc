// One pass over all ids, in chunks that threads take one by one. What takes most beside reading is to
// touch new memory for the first time: so it is taken in large blocks, and each number is copied once.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/crew.h"
#include "base/mutex.h"
#include "base/processor.h"
#include "records/build.h"
#include "tokens/stream.h"

namespace nostall::tokens {
namespace {

constexpr uint64_t kChunk = uint64_t{4} << 20;  // bytes
constexpr uint64_t kBlockBytes = uint64_t{8} << 20;

struct Chunk {
  size_t extent = 0;
  uint64_t skip = 0, tokens = 0;  // in the extent
  uint64_t first = 0;             // in the stream
  // Low halves of the tokens behind an end, but at the extent's end, and the memory that has them.
  std::span<const uint32_t> behind{};
  std::shared_ptr<const Shareable> block{};
};

// What a thread needs for a chunk, and again for the next one.
struct Scratch {
  Shareable bytes{kChunk};
  std::vector<uint32_t> behind;
  std::shared_ptr<Shareable> block;  // where `used` bytes have what chunks found
  uint64_t used = 0;

  // Keeps what was found.
  void give(Chunk& chunk) {
    const uint64_t size = behind.size() * sizeof(uint32_t);
    if (size == 0) return;
    if (!block || size > block->size() - used) {
      block = std::make_shared<Shareable>(std::max(size, kBlockBytes));
      used = 0;
    }
    auto* const to = reinterpret_cast<uint32_t*>(block->data() + used);
    std::memcpy(to, behind.data(), size);
    used += size;
    chunk.behind = {to, behind.size()};
    chunk.block = block;
  }
};

class Scratches {
 public:
  std::unique_ptr<Scratch> take() {
    {
      const MutexLock lock(mutex_);
      if (!free_.empty()) {
        auto taken = std::move(free_.back());
        free_.pop_back();
        return taken;
      }
    }
    return std::make_unique<Scratch>();
  }
  void give(std::unique_ptr<Scratch> scratch) {
    const MutexLock lock(mutex_);
    free_.push_back(std::move(scratch));
  }

 private:
  Mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_ NOSTALL_GUARDED_BY(mutex_);
};

constexpr uint64_t kBlock = 64;  // ids that are looked at together

// A bit for each id of a block that is `id`.
template <typename Id>
uint64_t equal_in(const std::byte* bytes, Id id) {
  uint64_t bits = 0;
#if defined(__x86_64__)
  const auto load = [&](uint64_t i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes) + i);
  };
  constexpr uint64_t kWide = sizeof(Id);  // registers of 16 ids
  for (uint64_t i = 0; i < kBlock / 16 && kWide < 8; ++i) {
    __m128i same;
    if constexpr (kWide == 1) {
      same = _mm_cmpeq_epi8(load(i), _mm_set1_epi8(static_cast<char>(id)));
    } else if constexpr (kWide == 2) {
      const __m128i all = _mm_set1_epi16(static_cast<int16_t>(id));
      same =
          _mm_packs_epi16(_mm_cmpeq_epi16(load(2 * i), all), _mm_cmpeq_epi16(load(2 * i + 1), all));
    } else {
      const __m128i all = _mm_set1_epi32(static_cast<int32_t>(id));
      const auto two = [&](uint64_t first) {
        return _mm_packs_epi32(_mm_cmpeq_epi32(load(first), all),
                               _mm_cmpeq_epi32(load(first + 1), all));
      };
      same = _mm_packs_epi16(two(4 * i), two(4 * i + 2));
    }
    bits |= uint64_t{static_cast<uint32_t>(_mm_movemask_epi8(same))} << 16 * i;
  }
  if constexpr (kWide < 8) return bits;
#endif
  for (uint64_t i = 0; i < kBlock; ++i) {
    Id found;
    std::memcpy(&found, bytes + i * sizeof found, sizeof found);
    bits |= uint64_t{found == id} << i;
  }
  return bits;
}

// Whether a block has an id above `most`: a loop without branches, which the compiler makes one over
// vectors.
template <typename Id>
inline __attribute__((always_inline)) bool above_in(const std::byte* bytes, Id most) {
  Id found = 0;
  for (uint64_t i = 0; i < kBlock; ++i) {
    Id id;
    std::memcpy(&id, bytes + i * sizeof id, sizeof id);
    found = static_cast<Id>(found | (id > most ? 1 : 0));
  }
  return found != 0;
}

#if defined(__x86_64__)
template <typename Id>
__attribute__((target("avx2"))) bool above_avx2(const std::byte* bytes, Id most) {
  return above_in<Id>(bytes, most);
}
#endif

template <typename Id>
bool above(const std::byte* bytes, Id most) {
#if defined(__x86_64__)
  if (processor().avx2) return above_avx2<Id>(bytes, most);
#endif
  return above_in<Id>(bytes, most);
}

// Throws for the first of some ids that is outside the vocabulary.
template <typename Id>
void refuse_outside(const std::byte* bytes, uint64_t begin, uint64_t end, uint64_t vocabulary,
                    const Chunk& chunk, const std::string& path) {
  for (uint64_t i = begin; i < end; ++i) {
    Id id;
    std::memcpy(&id, bytes + i * sizeof id, sizeof id);
    if (id < vocabulary) continue;
    throw Error(ErrorKind::corruption, path + ": token " + std::to_string(chunk.skip + i) + " is " +
                                           std::to_string(id) + ", outside the vocabulary of " +
                                           std::to_string(vocabulary) +
                                           ": another dtype, or another tokenizer?");
  }
}

template <typename Id>
void look(const Extent& extent, const std::byte* bytes, const Scan& scan, const Chunk& chunk,
          std::vector<uint32_t>& behind, const std::string& path) {
  constexpr uint64_t kMost = std::numeric_limits<Id>::max();
  // No id of this type is another end, or outside of a larger vocabulary.
  const bool ends = scan.end && *scan.end <= kMost;
  const bool compares = scan.vocabulary != 0 && scan.vocabulary - 1 < kMost;
  const auto end = static_cast<Id>(scan.end.value_or(0));
  const auto first = static_cast<uint32_t>(chunk.first + 1);  // behind the chunk's first token
  uint64_t begin = 0;
  for (; begin + kBlock <= chunk.tokens; begin += kBlock) {
    const std::byte* block = bytes + begin * sizeof(Id);
    if (compares && above<Id>(block, static_cast<Id>(scan.vocabulary - 1))) {
      refuse_outside<Id>(bytes, begin, begin + kBlock, scan.vocabulary, chunk, path);
    }
    if (!ends) continue;
    uint64_t bits = equal_in<Id>(block, end);
    const size_t known = behind.size();
    behind.resize(known + static_cast<size_t>(std::popcount(bits)));
    for (uint32_t* to = behind.data() + known; bits != 0; bits &= bits - 1) {
      *to++ = first + static_cast<uint32_t>(begin) + static_cast<uint32_t>(std::countr_zero(bits));
    }
  }
  if (compares) refuse_outside<Id>(bytes, begin, chunk.tokens, scan.vocabulary, chunk, path);
  for (; ends && begin < chunk.tokens; ++begin) {
    Id id;
    std::memcpy(&id, bytes + begin * sizeof id, sizeof id);
    if (id == end) behind.push_back(first + static_cast<uint32_t>(begin));
  }
  // Behind the last token of an extent no document begins.
  const uint64_t last = extent.tokens - chunk.skip;
  if (last == chunk.tokens && !behind.empty() &&
      behind.back() == first + static_cast<uint32_t>(last) - 1) {
    behind.pop_back();
  }
}

void look(uint32_t width, const Extent& extent, const std::byte* bytes, const Scan& scan,
          const Chunk& chunk, std::vector<uint32_t>& behind, const std::string& path) {
  switch (width) {
    case 1:
      return look<uint8_t>(extent, bytes, scan, chunk, behind, path);
    case 2:
      return look<uint16_t>(extent, bytes, scan, chunk, behind, path);
    case 4:
      return look<uint32_t>(extent, bytes, scan, chunk, behind, path);
    default:
      return look<uint64_t>(extent, bytes, scan, chunk, behind, path);
  }
}

// Where documents begin, by what the chunks found; gives their memory back.
Documents put_together(std::vector<Chunk>& chunks, uint64_t tokens, unsigned threads) {
  std::vector<uint64_t> before;  // documents before each chunk
  std::vector<uint64_t> blocks{0};
  uint64_t documents = 0;
  const auto reach = [&](uint64_t begin, uint64_t known) {
    while (blocks.size() <= begin >> 32) blocks.push_back(known);
  };
  for (const Chunk& chunk : chunks) {
    before.push_back(documents);
    reach(chunk.first, documents);
    if (chunk.skip == 0) ++documents;
    // Low halves rise, but where a block ends, of which a chunk has at most one.
    if ((chunk.first + chunk.tokens) >> 32 != chunk.first >> 32) {
      const auto wraps =
          std::find_if(chunk.behind.begin(), chunk.behind.end(),
                       [&](uint32_t value) { return value < static_cast<uint32_t>(chunk.first); });
      if (wraps != chunk.behind.end()) {
        reach((chunk.first >> 32 << 32) + (uint64_t{1} << 32),
              documents + static_cast<uint64_t>(wraps - chunk.behind.begin()));
      }
    }
    documents += chunk.behind.size();
  }
  reach(((tokens >> 32) + 1) << 32, documents);
  std::unique_ptr<Shareable> low;
  if (documents > 0) low = std::make_unique<Shareable>(documents * sizeof(uint32_t));
  std::atomic<size_t> next{0};
  share(static_cast<unsigned>(std::min<size_t>(threads, chunks.size())), [&](bool) {
    for (size_t c = next++; c < chunks.size(); c = next++) {
      Chunk& chunk = chunks[c];
      auto* to = reinterpret_cast<uint32_t*>(low->data()) + before[c];
      if (chunk.skip == 0) *to++ = static_cast<uint32_t>(chunk.first);
      if (!chunk.behind.empty()) std::memcpy(to, chunk.behind.data(), chunk.behind.size_bytes());
      chunk.behind = {};
      chunk.block.reset();
    }
  });
  return {std::move(low), std::move(blocks), tokens};
}

}  // namespace

Documents scan_documents(const records::Storage& storage, uint32_t width,
                         std::span<const Extent> extents, const Scan& scan, unsigned threads,
                         const std::function<void(uint64_t)>& progress) {
  std::vector<Chunk> chunks;
  uint64_t tokens = 0;
  const bool reads = scan.end || scan.vocabulary != 0;
  for (size_t e = 0; e < extents.size(); ++e) {
    const uint64_t most = reads ? kChunk / width : extents[e].tokens;
    for (uint64_t skip = 0; skip < extents[e].tokens; skip += most) {
      chunks.push_back({e, skip, std::min(most, extents[e].tokens - skip), tokens + skip});
    }
    tokens += extents[e].tokens;
  }
  if (reads) {
    Scratches scratches;
    records::each_in_parallel(
        storage, chunks.size(), threads,
        [&](records::RangeReader& reader, uint64_t i) {
          Chunk& chunk = chunks[i];
          const Extent& extent = extents[chunk.extent];
          auto scratch = scratches.take();
          scratch->behind.clear();
          const std::span bytes(scratch->bytes.data(), chunk.tokens * width);
          records::read_range(reader, storage, extent.file, extent.offset + chunk.skip * width,
                              bytes);
          look(width, extent, bytes.data(), scan, chunk, scratch->behind,
               storage.files()[extent.file].path);
          scratch->give(chunk);
          scratches.give(std::move(scratch));
        },
        progress);
  }
  return put_together(chunks, tokens, threads);
}

}  // namespace nostall::tokens
