// Encodes and decodes the header at fixed offsets.
#include "peer/wire.h"

#include <algorithm>
#include <string>

namespace nostall::peer {
namespace {

// Offsets of the fields; docs/formats/wire.md has the table.
constexpr size_t kAtMagic = 0, kAtVersion = 4, kAtKind = 6, kAtStatus = 7, kAtFrom = 8, kAtTo = 12,
                 kAtSequence = 16, kAtRequest = 24, kAtSample = 32, kAtProgress = 40,
                 kAtLength = 48, kAtCrc = 56, kAtReserved = 60, kAtNonce = 64, kAtTag = 80;
static_assert(kAtTag + kTagBytes == kHeaderBytes);

template <typename T>
void put(HeaderBytes& bytes, size_t at, T value) noexcept {
  for (size_t i = 0; i < sizeof(T); ++i) {
    bytes[at + i] = static_cast<std::byte>((static_cast<uint64_t>(value) >> (8 * i)) & 0xff);
  }
}

template <typename T>
T get(std::span<const std::byte> bytes, size_t at) noexcept {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    value |= static_cast<uint64_t>(std::to_integer<uint8_t>(bytes[at + i])) << (8 * i);
  }
  return static_cast<T>(value);
}

Error malformed(const std::string& what) {
  return {ErrorKind::corruption, "a message between ranks is malformed: " + what};
}

}  // namespace

HeaderBytes encode(const Header& header) noexcept {
  HeaderBytes bytes{};
  put(bytes, kAtMagic, kMagic);
  put(bytes, kAtVersion, kWireVersion);
  put(bytes, kAtKind, static_cast<uint8_t>(header.kind));
  put(bytes, kAtStatus, static_cast<uint8_t>(header.status));
  put(bytes, kAtFrom, header.from);
  put(bytes, kAtTo, header.to);
  put(bytes, kAtSequence, header.sequence);
  put(bytes, kAtRequest, header.request);
  put(bytes, kAtSample, header.sample);
  put(bytes, kAtProgress, header.progress);
  put(bytes, kAtLength, header.length);
  put(bytes, kAtCrc, header.crc);
  std::copy(header.nonce.begin(), header.nonce.end(), bytes.begin() + kAtNonce);
  std::copy(header.tag.begin(), header.tag.end(), bytes.begin() + kAtTag);
  return bytes;
}

Result<Header> decode(std::span<const std::byte> bytes) {
  if (bytes.size() != kHeaderBytes) {
    return malformed("its header has " + std::to_string(bytes.size()) + " bytes, not " +
                     std::to_string(kHeaderBytes));
  }
  if (get<uint32_t>(bytes, kAtMagic) != kMagic) return malformed("it is not of nostall");
  if (const auto version = get<uint16_t>(bytes, kAtVersion); version != kWireVersion) {
    return malformed("its version is " + std::to_string(version) + ", this release speaks " +
                     std::to_string(kWireVersion));
  }
  const auto kind = get<uint8_t>(bytes, kAtKind);
  const auto status = get<uint8_t>(bytes, kAtStatus);
  if (kind == 0 || kind > kLastKind) return malformed("unknown kind " + std::to_string(kind));
  if (status > static_cast<uint8_t>(Status::never)) {
    return malformed("unknown status " + std::to_string(status));
  }
  if (get<uint32_t>(bytes, kAtReserved) != 0) return malformed("reserved bytes are not 0");
  Header header;
  header.kind = static_cast<Kind>(kind);
  header.status = static_cast<Status>(status);
  header.from = get<uint32_t>(bytes, kAtFrom);
  header.to = get<uint32_t>(bytes, kAtTo);
  header.sequence = get<uint64_t>(bytes, kAtSequence);
  header.request = get<uint64_t>(bytes, kAtRequest);
  header.sample = get<uint64_t>(bytes, kAtSample);
  header.progress = get<uint64_t>(bytes, kAtProgress);
  header.length = get<uint64_t>(bytes, kAtLength);
  header.crc = get<uint32_t>(bytes, kAtCrc);
  if (header.length > kMaxPayload) {
    return malformed("a payload of " + std::to_string(header.length) + " bytes");
  }
  std::copy_n(bytes.begin() + kAtNonce, kNonceBytes, header.nonce.begin());
  std::copy_n(bytes.begin() + kAtTag, kTagBytes, header.tag.begin());
  return header;
}

}  // namespace nostall::peer
