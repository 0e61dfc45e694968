// The file of checksums (docs/formats/sums.md), and the probe: a few samples, drawn at random, are
// read and compared before checksums of an earlier run are trusted.
#include "source/sums.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "base/crc32c.h"
#include "base/random.h"
#include "source/index.h"

namespace nostall::source {
namespace {

constexpr uint32_t kMagic = 0x53534e31;  // "1NSS"
constexpr uint32_t kVersion = 1;
constexpr size_t kHeader = 32, kTail = 4;
constexpr uint64_t kMostProbed = 64, kLeastProbed = 16;
constexpr uint64_t kMostProbedBytes = uint64_t{16} << 20;
constexpr unsigned kDepth = 16;
constexpr uint64_t kPiece = uint64_t{1} << 20;  // whole checksums

void put(std::byte* at, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>((value >> (8 * i)) & 0xff);
}

uint64_t get(const std::byte* at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value |= uint64_t{uint8_t(at[i])} << (8 * i);
  return value;
}

Error damaged(const char* what) {
  return Error(ErrorKind::corruption, std::string("the stored checksums are damaged: ") + what);
}

// The stored form, read piece by piece: tables of checksums may be large.
class Stored {
 public:
  // Fills `into`; false if that cannot be.
  using Read = std::function<bool(std::span<std::byte> into, uint64_t offset)>;
  Stored(Read read, uint64_t size) : read_(std::move(read)), size_(size) {}

  struct Head {
    uint64_t stamp = 0, known = 0;
  };
  // Of a form that is sound, and of this data set.
  Result<Head> check(uint64_t dataset, uint64_t samples) {
    std::array<std::byte, kHeader> head{};
    if (size_ < kHeader + kTail || !read_(head, 0)) return damaged("they are cut off");
    if (get(head.data(), 4) != kMagic) return damaged("wrong magic");
    if (get(head.data() + 4, 4) != kVersion) return damaged("unknown version");
    if (get(head.data() + 8, 8) != dataset || get(head.data() + 24, 8) != samples) {
      return damaged("they are of another data set");
    }
    if (size_ != stored_sums_bytes(samples)) return damaged("their number is wrong");
    samples_ = samples;
    Head found{get(head.data() + 16, 8), 0};
    uint32_t crc = crc32c(head);
    const bool whole = pieces([&](uint64_t, std::span<const std::byte> piece) {
      crc = crc32c(piece, crc);
      for (size_t i = 0; i < piece.size(); i += 4) found.known += get(&piece[i], 4) != 0;
    });
    std::array<std::byte, kTail> tail{};
    if (!whole || !read_(tail, size_ - kTail)) return damaged("they are cut off");
    if (get(tail.data(), kTail) != crc) return damaged("wrong checksum");
    return found;
  }

  // After check(): those that are known, in rising order; false if they cannot be read again.
  template <typename Use>
  bool each(Use use) const {
    return pieces([&](uint64_t sample, std::span<const std::byte> piece) {
      for (size_t i = 0; i < piece.size(); i += 4, ++sample) {
        if (const auto sum = static_cast<uint32_t>(get(&piece[i], 4)); sum != 0) use(sample, sum);
      }
    });
  }

 private:
  template <typename Use>
  bool pieces(Use use) const {
    std::vector<std::byte> buffer(std::min<uint64_t>(kPiece, 4 * samples_));
    for (uint64_t at = 0; at < 4 * samples_; at += buffer.size()) {
      const auto piece = std::span(buffer).first(std::min<uint64_t>(kPiece, 4 * samples_ - at));
      if (!read_(piece, kHeader + at)) return false;
      use(at / 4, piece);
    }
    return true;
  }

  const Read read_;
  const uint64_t size_;
  uint64_t samples_ = 0;
};

}  // namespace

SampleSums& Source::sums() const {
  std::call_once(sums_made_, [this] { sums_ = make_sums(); });
  return sums_;
}

uint64_t stored_sums_bytes(uint64_t samples) noexcept { return kHeader + 4 * samples + kTail; }

std::vector<std::byte> serialize_sums(uint64_t dataset, uint64_t stamp, const SampleSums& sums) {
  std::vector<std::byte> out(stored_sums_bytes(sums.size()));
  put(out.data(), kMagic, 4);
  put(out.data() + 4, kVersion, 4);
  put(out.data() + 8, dataset, 8);
  put(out.data() + 16, stamp, 8);
  put(out.data() + 24, sums.size(), 8);
  std::byte* at = out.data() + kHeader;
  for (uint64_t s = 0; s < sums.size(); ++s, at += 4) put(at, sums.of(s), 4);
  put(at, crc32c(std::span(out).first(out.size() - kTail)), kTail);
  return out;
}

Result<uint64_t> parse_sums(std::span<const std::byte> bytes, uint64_t dataset, SampleSums& into) {
  Stored stored(
      [bytes](std::span<std::byte> piece, uint64_t offset) {
        std::ranges::copy(bytes.subspan(offset, piece.size()), piece.begin());
        return true;
      },
      bytes.size());
  const auto head = stored.check(dataset, into.size());
  if (!head) return head.error();
  stored.each([&](uint64_t sample, uint32_t sum) { into.agrees(sample, sum); });
  return head.value().stamp;
}

uint64_t probe_size(uint64_t known, bool same_stamp) noexcept {
  const uint64_t share = (known + 99) / 100;
  return std::min(known, same_stamp ? std::clamp(share, kLeastProbed, kMostProbed) : kMostProbed);
}

std::vector<uint64_t> draw(const Source& source, uint64_t known, bool same_stamp) {
  const uint64_t count = probe_size(known, same_stamp);
  if (count == known) {
    std::vector<uint64_t> all(known);
    std::iota(all.begin(), all.end(), uint64_t{0});
    return all;
  }
  SampleRandom random(source.fingerprint(), 0, 0);
  std::set<uint64_t> drawn;
  while (drawn.size() < count) {
    drawn.insert(((uint64_t{random.next()} << 32) | random.next()) % known);
  }
  return {drawn.begin(), drawn.end()};
}

Probe probe(const Source& source, std::span<const KnownSum> drawn, bool same_stamp) {
  if (same_stamp && source.stamp_tells_content()) return {};
  std::vector<ReadRequest> requests;
  std::vector<std::vector<std::byte>> bytes;
  uint64_t total = 0;
  for (const KnownSum& k : drawn) {
    const uint64_t size = source.sizes()[k.sample];
    if (!requests.empty() && size > kMostProbedBytes - std::min(total, kMostProbedBytes)) continue;
    total += size;
    bytes.emplace_back(size);
    requests.push_back({k.sample, bytes.back()});
  }
  if (requests.empty()) return {};
  source.make_reader(ReaderKind::automatic, kDepth)->read(requests);
  Probe result;
  size_t r = 0;
  for (const KnownSum& k : drawn) {
    if (r == requests.size()) break;
    const ReadRequest& request = requests[r];
    if (request.sample != k.sample) continue;
    ++r;
    if (request.error != 0 && request.error != kWrongBytes && request.error != kSizeChanged) {
      continue;
    }
    ++result.compared;
    result.different += request.error != 0 || sample_sum(request.into) != k.sum;
  }
  return result;
}

bool another_version(const Probe& probe, bool same_stamp) noexcept {
  return probe.different > 0 && (!same_stamp || 2 * probe.different >= probe.compared);
}

std::string open_sums(const Source& source, const std::string& path) {
  source.set_sums_file(path);
  const auto opened = open_stored(path, kMagic, stored_sums_bytes(source.size()));
  if (!opened) return {};
  const int file = opened.value().file.get();
  Stored stored(
      [file](std::span<std::byte> into, uint64_t offset) {
        return FileSystem::real().pread(file, into, offset) == static_cast<int64_t>(into.size());
      },
      opened.value().size);
  const auto head = stored.check(source.fingerprint(), source.size());
  if (!head) return {};
  const bool same = head.value().stamp == source.stamp();
  const std::vector<uint64_t> ranks = draw(source, head.value().known, same);
  std::vector<KnownSum> drawn;
  uint64_t rank = 0;
  const bool found = stored.each([&](uint64_t sample, uint32_t sum) {
    if (drawn.size() < ranks.size() && ranks[drawn.size()] == rank) drawn.push_back({sample, sum});
    ++rank;
  });
  if (!found) return {};
  const Probe seen = probe(source, drawn, same);
  if (another_version(seen, same)) {
    return std::to_string(seen.different) + " of " + std::to_string(seen.compared) +
           " samples have another content than the one that was read first";
  }
  SampleSums& sums = source.sums();
  stored.each([&](uint64_t sample, uint32_t sum) { sums.agrees(sample, sum); });
  source.set_sums_kept(head.value().known);
  return {};
}

std::string changed_text(const Source& source, uint64_t sample, uint32_t then, uint32_t now) {
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(),
                "its bytes are not those that were read first, CRC32C %08x then, %08x now", then,
                now);
  const std::string& file = source.sums_file_of(sample);
  return text.data() + std::string(" (if it was changed on purpose: ") +
         (file.empty() ? "start again)" : "remove " + file + " and start again)");
}

int keep_sums(const Source& source, FileSystem& files) {
  if (source.sums_file().empty()) return 0;
  const uint64_t known = source.sums().known();
  if (known == source.sums_kept()) return 0;
  // Of what was read first there is no other witness.
  const int error = store_index(source.sums_file(),
                                serialize_sums(source.fingerprint(), source.stamp(), source.sums()),
                                files, Flush::yes);
  if (error == 0) source.set_sums_kept(known);
  return error;
}

}  // namespace nostall::source
