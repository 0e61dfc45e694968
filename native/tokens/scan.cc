// One pass over all ids, in chunks that threads take one by one.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "base/processor.h"
#include "records/build.h"
#include "tokens/stream.h"

namespace nostall::tokens {
namespace {

constexpr uint64_t kChunk = uint64_t{4} << 20;  // bytes

struct Chunk {
  size_t extent = 0;
  uint64_t skip = 0, tokens = 0;  // in the extent
  uint64_t first = 0;             // in the stream
  std::vector<uint32_t> behind;   // low halves of the tokens behind an end, but at the extent's end
};

constexpr uint64_t kBlock = 128;  // ids that are looked at together

// Whether a block has the end of a document or an id outside the vocabulary: a loop without branches,
// which the compiler makes one over vectors.
template <typename Id>
inline __attribute__((always_inline)) bool remarkable_in(const std::byte* bytes, const Scan& scan) {
  const auto end = static_cast<Id>(scan.end.value_or(0));
  const Id ends = scan.end ? 1 : 0;
  const auto most = static_cast<Id>(scan.vocabulary - 1);  // all, without a vocabulary
  Id found = 0;
  for (uint64_t i = 0; i < kBlock; ++i) {
    Id id;
    std::memcpy(&id, bytes + i * sizeof id, sizeof id);
    found = static_cast<Id>(found | (id == end ? ends : 0) | (id > most ? 1 : 0));
  }
  return found != 0;
}

#if defined(__x86_64__)
template <typename Id>
__attribute__((target("avx2"))) bool remarkable_avx2(const std::byte* bytes, const Scan& scan) {
  return remarkable_in<Id>(bytes, scan);
}
#endif

template <typename Id>
bool remarkable(const std::byte* bytes, const Scan& scan) {
#if defined(__x86_64__)
  if (processor().avx2) return remarkable_avx2<Id>(bytes, scan);
#endif
  return remarkable_in<Id>(bytes, scan);
}

template <typename Id>
void look(const Extent& extent, std::span<const std::byte> bytes, const Scan& scan, Chunk& chunk,
          const std::string& path) {
  const uint64_t last = extent.tokens - chunk.skip;  // in the extent, from this chunk's beginning
  // No id of this type is outside of a larger vocabulary.
  Scan of_type = scan;
  if (scan.vocabulary > std::numeric_limits<Id>::max()) of_type.vocabulary = 0;
  for (uint64_t begin = 0; begin < chunk.tokens; begin += kBlock) {
    const uint64_t end = std::min(begin + kBlock, chunk.tokens);
    if (end == begin + kBlock && !remarkable<Id>(bytes.data() + begin * sizeof(Id), of_type)) {
      continue;
    }
    const size_t known = chunk.behind.size();
    chunk.behind.resize(known + (scan.end ? end - begin : 0));
    uint32_t* behind = chunk.behind.data() + known;
    for (uint64_t i = begin; i < end; ++i) {
      Id id;
      std::memcpy(&id, bytes.data() + i * sizeof id, sizeof id);
      if (scan.end) {
        *behind = static_cast<uint32_t>(chunk.first + i + 1);
        behind += id == *scan.end && i + 1 < last ? 1 : 0;
      }
      if (scan.vocabulary != 0 && id >= scan.vocabulary) {
        throw Error(ErrorKind::corruption,
                    path + ": token " + std::to_string(chunk.skip + i) + " is " +
                        std::to_string(id) + ", outside the vocabulary of " +
                        std::to_string(scan.vocabulary) + ": another dtype, or another tokenizer?");
      }
    }
    chunk.behind.resize(static_cast<size_t>(behind - chunk.behind.data()));
  }
}

void look(uint32_t width, const Extent& extent, std::span<const std::byte> bytes, const Scan& scan,
          Chunk& chunk, const std::string& path) {
  switch (width) {
    case 1:
      return look<uint8_t>(extent, bytes, scan, chunk, path);
    case 2:
      return look<uint16_t>(extent, bytes, scan, chunk, path);
    case 4:
      return look<uint32_t>(extent, bytes, scan, chunk, path);
    default:
      return look<uint64_t>(extent, bytes, scan, chunk, path);
  }
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
      chunks.push_back({e, skip, std::min(most, extents[e].tokens - skip), tokens + skip, {}});
    }
    tokens += extents[e].tokens;
  }
  if (reads) {
    records::each_in_parallel(
        storage, chunks.size(), threads,
        [&](records::RangeReader& reader, uint64_t i) {
          Chunk& chunk = chunks[i];
          const Extent& extent = extents[chunk.extent];
          const size_t size = chunk.tokens * width;
          const auto memory = std::make_unique_for_overwrite<std::byte[]>(size);
          const std::span bytes(memory.get(), size);
          records::read_range(reader, storage, extent.file, extent.offset + chunk.skip * width,
                              bytes);
          look(width, extent, bytes, scan, chunk, storage.files()[extent.file].path);
        },
        progress);
  }
  std::vector<uint32_t> low;
  std::vector<uint64_t> blocks{0};
  const auto add = [&](uint64_t begin) {
    while (blocks.size() <= begin >> 32) blocks.push_back(low.size());
    low.push_back(static_cast<uint32_t>(begin));
  };
  for (const Chunk& chunk : chunks) {
    if (chunk.skip == 0) add(chunk.first);
    for (const uint32_t behind : chunk.behind) {
      add(chunk.first + static_cast<uint32_t>(behind - static_cast<uint32_t>(chunk.first)));
    }
  }
  while (blocks.size() < (tokens >> 32) + 2) blocks.push_back(low.size());
  return {low, std::move(blocks), tokens};
}

}  // namespace nostall::tokens
