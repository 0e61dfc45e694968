// peer/wire.h - the header that every message between ranks carries (docs/formats/wire.md).
//
// 96 bytes, little-endian, the same for all kinds; a payload may follow. The parser is total: any
// bytes give a Header or an Error. Thread-safety: pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"

namespace nostall::peer {

inline constexpr uint32_t kMagic = 0x5250534e;  // "NSPR"
inline constexpr uint16_t kWireVersion = 2;
inline constexpr size_t kHeaderBytes = 96;
inline constexpr size_t kTagBytes = 16;
inline constexpr size_t kNonceBytes = 16;
// Larger samples do not travel; a length above it is refused before anything is allocated.
inline constexpr uint64_t kMaxPayload = uint64_t{1} << 32;

enum class Kind : uint8_t {
  hello = 1,      // initiator: nonce; `sample` is the fingerprint of its plan
  challenge = 2,  // responder: its nonce, and proof that it has the secret
  proof = 3,      // initiator: its nonce again, and proof that it has it too; the session begins
  welcome = 4,    // responder: it does
  fetch = 5,      // initiator asks for `sample`
  reply = 6,      // responder: `status`, and the bytes if there are any
  push = 7,       // initiator hands over the bytes of `sample`
  progress = 8,   // responder notifies how far its node is
  done = 9,       // either: requests nothing more, still answers
  leave = 10,     // either: answers nothing more
};
inline constexpr uint8_t kLastKind = 10;

enum class Status : uint8_t {
  here = 0,     // the bytes follow
  not_yet = 1,  // the owner does not have it so far
  never = 2,    // the owner will not have it
};

struct Header {
  Kind kind = Kind::hello;
  Status status = Status::here;
  uint32_t from = 0;      // rank
  uint32_t to = 0;        // rank
  uint64_t sequence = 0;  // of this direction of this session, from 1 on
  uint64_t request = 0;   // of a fetch, repeated in its reply
  uint64_t sample = 0;
  uint64_t progress = 0;  // of the sender's node: all it owns with an earlier first access is there
  uint64_t length = 0;    // of the payload
  uint32_t crc = 0;       // CRC32C of the payload
  std::array<std::byte, kNonceBytes> nonce{};
  std::array<std::byte, kTagBytes> tag{};  // over all before it
};

using HeaderBytes = std::array<std::byte, kHeaderBytes>;

HeaderBytes encode(const Header& header) noexcept;
// Checks size, magic, version, kind, status, length and that reserved bytes are 0.
Result<Header> decode(std::span<const std::byte> bytes);

}  // namespace nostall::peer
