// The file of checksums (docs/formats/sums.md), and the probe: a few samples, drawn at random, are
// read and compared before checksums of an earlier run are trusted.
#include "source/sums.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <unordered_set>

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

// Distinct numbers below `from`, in rising order.
std::vector<uint64_t> draw_numbers(uint64_t from, uint64_t seed, uint64_t count) {
  std::vector<uint64_t> drawn;
  if (count >= from) {
    for (uint64_t i = 0; i < from; ++i) drawn.push_back(i);
    return drawn;
  }
  SampleRandom random(seed, 0, 0);
  std::unordered_set<uint64_t> seen;
  while (seen.size() < count) {
    seen.insert(((uint64_t{random.next()} << 32) | random.next()) % from);
  }
  drawn.assign(seen.begin(), seen.end());
  std::sort(drawn.begin(), drawn.end());
  return drawn;
}

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
  if (bytes.size() < kHeader + kTail) return damaged("they are cut off");
  const auto content = bytes.first(bytes.size() - kTail);
  if (get(bytes.data() + content.size(), kTail) != crc32c(content)) {
    return damaged("wrong checksum");
  }
  if (get(content.data(), 4) != kMagic) return damaged("wrong magic");
  if (get(content.data() + 4, 4) != kVersion) return damaged("unknown version");
  if (get(content.data() + 8, 8) != dataset || get(content.data() + 24, 8) != into.size()) {
    return damaged("they are of another data set");
  }
  if (bytes.size() != stored_sums_bytes(into.size())) return damaged("their number is wrong");
  const std::byte* at = content.data() + kHeader;
  for (uint64_t s = 0; s < into.size(); ++s, at += 4) {
    if (const auto sum = static_cast<uint32_t>(get(at, 4)); sum != 0) into.agrees(s, sum);
  }
  return get(content.data() + 16, 8);
}

uint64_t probe_size(uint64_t known, bool same_stamp) noexcept {
  const uint64_t share = (known + 99) / 100;
  return std::min(known, same_stamp ? std::clamp(share, kLeastProbed, kMostProbed) : kMostProbed);
}

std::vector<KnownSum> draw(std::span<const KnownSum> known, uint64_t seed, uint64_t count) {
  std::vector<KnownSum> drawn;
  for (const uint64_t i : draw_numbers(known.size(), seed, count)) drawn.push_back(known[i]);
  return drawn;
}

Probe probe(const Source& source, std::span<const KnownSum> all, bool same_stamp) {
  if (same_stamp && source.stamp_tells_content()) return {};
  const std::vector<KnownSum> known =
      draw(all, source.fingerprint(), probe_size(all.size(), same_stamp));
  std::vector<ReadRequest> requests;
  std::vector<std::vector<std::byte>> bytes;
  uint64_t total = 0;
  for (const KnownSum& k : known) {
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
  for (const KnownSum& k : known) {
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
  auto bytes = load_bytes(path, kMagic, stored_sums_bytes(source.size()));
  if (!bytes) return {};
  SampleSums stored(source.size());
  const auto stamp = parse_sums(bytes.value(), source.fingerprint(), stored);
  if (!stamp) return {};
  const bool same = stamp.value() == source.stamp();
  std::vector<KnownSum> known;
  for (uint64_t s = 0; s < stored.size(); ++s) {
    if (stored.of(s) != 0) known.push_back({s, stored.of(s)});
  }
  const Probe seen = probe(source, known, same);
  if (another_version(seen, same)) {
    return std::to_string(seen.different) + " of " + std::to_string(seen.compared) +
           " samples have another content than the one that was read first";
  }
  source.sums().learn(stored);
  source.set_sums_kept(known.size());
  return {};
}

std::string changed_text(const Source& source, uint64_t sample, uint32_t then, uint32_t now) {
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(),
                "its bytes are not those that were read first (CRC32C %08x then, %08x now)", then,
                now);
  const std::string& file = source.sums_file_of(sample);
  return text.data() + std::string(": restore it, or, if it was changed on purpose, ") +
         (file.empty() ? "start again" : "remove " + file + " and start again");
}

int keep_sums(const Source& source, FileSystem& files) {
  if (source.sums_file().empty()) return 0;
  const uint64_t known = source.sums().known();
  if (known <= source.sums_kept()) return 0;
  // Of what was read first there is no other witness.
  const int error = store_index(source.sums_file(),
                                serialize_sums(source.fingerprint(), source.stamp(), source.sums()),
                                files, Flush::yes);
  if (error == 0) source.set_sums_kept(known);
  return error;
}

}  // namespace nostall::source
