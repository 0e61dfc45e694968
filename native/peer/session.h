// peer/session.h - checks that a message is from the rank it names, of this job, and is new.
//
// Every rank of a job has the job's secret. A session between an initiator and a responder begins
// with a nonce from each side. Its keys, one per direction, are derived from secret, nonces and
// ranks. Every header from the challenge on carries a sequence number and a keyed BLAKE2b tag over
// the whole header; a correct tag proves that the sender has the secret. The secret is never on
// the wire. A payload is tied to its header by CRC32C alone: an attacker that can change packets in
// flight can forge a payload (docs/guide/clusters.md). Thread-safety: a Session belongs to one
// thread.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <string_view>

#include "peer/wire.h"

namespace nostall::peer {

inline constexpr size_t kKeyBytes = 32;
using Key = std::array<std::byte, kKeyBytes>;
using Nonce = std::array<std::byte, kNonceBytes>;
using Tag = std::array<std::byte, kTagBytes>;

Nonce random_nonce();
Key random_key();
// Not predictable without the key; the same for the same arguments.
Nonce derived_nonce(const Key& key, uint32_t rank, uint64_t count, const Nonce& theirs);
// A key from whatever the job calls its secret; at least 16 bytes, else Error(usage).
Key key_of(std::string_view secret);

class Session {
 public:
  // Both ends construct the same one. Keys of the two directions differ.
  Session(const Key& secret, uint32_t initiator, uint32_t responder, const Nonce& initiator_nonce,
          const Nonce& responder_nonce);

  // Sets sequence and tag of a message to be sent by `header.from`.
  HeaderBytes seal(Header& header) noexcept;
  // True if the message was sealed by the other end and is new.
  bool open(const Header& header) noexcept;

 private:
  static constexpr size_t kWindow = 4096;  // messages that may overtake each other
  Key to_responder_, to_initiator_;
  uint32_t initiator_;
  uint64_t sent_ = 0;
  uint64_t highest_ = 0;
  std::bitset<kWindow> seen_;
};

}  // namespace nostall::peer
