// Sums over the places of images, and these places from a scan.
#include "tokens/stretched.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/fnv.h"
#include "records/build.h"

namespace nostall::tokens {

Stretched::Stretched(std::vector<uint64_t> places, std::span<const uint32_t> costs)
    : places_(std::move(places)), added_{0} {
  if (costs.size() != places_.size()) {
    throw Error(ErrorKind::usage, std::to_string(costs.size()) + " costs are not those of " +
                                      std::to_string(places_.size()) + " images");
  }
  for (const uint32_t cost : costs) {
    if (cost == 0) throw Error(ErrorKind::usage, "an image costs one token or more");
    added_.push_back(added_.back() + cost - 1);
  }
  fingerprint_ = Fnv(crc32c(std::as_bytes(std::span(places_))))
                     .number(crc32c(std::as_bytes(std::span(added_))))
                     .number(places_.size())
                     .value();
}

size_t Stretched::first(uint64_t token) const noexcept {
  return static_cast<size_t>(std::lower_bound(places_.begin(), places_.end(), token) -
                             places_.begin());
}

namespace {

// Where the longest piece of at most `most` tokens ends that begins at `begin`, of a document that has
// more.
uint64_t piece_end(const Stretched& stretched, uint64_t begin, uint64_t most) {
  uint64_t at = begin, room = most;
  for (size_t i = stretched.first(begin); i < stretched.size(); ++i) {
    if (stretched.place(i) - at >= room) break;  // in the text before the image
    room -= stretched.place(i) - at;
    at = stretched.place(i);
    if (stretched.cost(i) > room) {
      if (at > begin) return at;
      throw Error(ErrorKind::usage, "image " + std::to_string(i) + " costs " +
                                        std::to_string(stretched.cost(i)) +
                                        " tokens, more than a unit of " + std::to_string(most));
    }
    room -= stretched.cost(i);
    ++at;
  }
  return at + room;
}

}  // namespace

std::vector<uint64_t> cut_documents(const Documents& documents, const Stretched& stretched,
                                    uint64_t most) {
  std::vector<uint64_t> begins;
  for (uint64_t d = 0; d < documents.size(); ++d) {
    const uint64_t end = documents.end(d);
    begins.push_back(documents.begin(d));
    while (stretched.length(begins.back(), end) > most) {
      begins.push_back(piece_end(stretched, begins.back(), most));
    }
  }
  begins.push_back(documents.tokens());
  return begins;
}

std::vector<uint64_t> places_of(const Stream& stream, const Documents& ended, uint64_t id,
                                unsigned threads) {
  const std::vector<Extent>& extents = stream.index().extents;
  // Behind the last token of an extent no document begins.
  std::vector<uint8_t> last(extents.size());
  records::each_in_parallel(
      stream.storage(), extents.size(), threads, [&](records::RangeReader& reader, uint64_t e) {
        const Extent& extent = extents[e];
        if (extent.tokens == 0) return;
        uint64_t found = 0;
        const std::span into(reinterpret_cast<std::byte*>(&found), stream.width());
        records::read_range(reader, stream.storage(), extent.file,
                            extent.offset + (extent.tokens - 1) * stream.width(), into);
        last[e] = found == id ? 1 : 0;
      });
  std::vector<uint64_t> places;
  uint64_t begin = 0, d = 0;
  for (size_t e = 0; e < extents.size(); ++e) {
    const uint64_t end = begin + extents[e].tokens;
    for (; d < ended.size() && ended.begin(d) < end; ++d) {
      if (ended.begin(d) > begin) places.push_back(ended.begin(d) - 1);
    }
    if (last[e] != 0) places.push_back(end - 1);
    begin = end;
  }
  return places;
}

}  // namespace nostall::tokens
