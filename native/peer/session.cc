// Keys and tags by libsodium's BLAKE2b; replays are refused with a window of sequence numbers.
#include "peer/session.h"

#include <sodium.h>

#include <algorithm>
#include <span>

namespace nostall::peer {
namespace {

static_assert(kKeyBytes == crypto_generichash_KEYBYTES);
static_assert(kTagBytes >= crypto_generichash_BYTES_MIN);

unsigned char* raw(std::byte* p) { return reinterpret_cast<unsigned char*>(p); }
const unsigned char* raw(const std::byte* p) { return reinterpret_cast<const unsigned char*>(p); }

void start_sodium() {
  static const bool ready = ::sodium_init() >= 0;
  if (!ready) throw Error(ErrorKind::io, "libsodium cannot be initialised: no random numbers");
}

Key derive(const Key& secret, std::string_view purpose, std::span<const std::byte> context) {
  Key key;
  crypto_generichash_state state;
  crypto_generichash_init(&state, raw(secret.data()), secret.size(), key.size());
  crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(purpose.data()),
                            purpose.size());
  crypto_generichash_update(&state, raw(context.data()), context.size());
  crypto_generichash_final(&state, raw(key.data()), key.size());
  return key;
}

Tag tag_of(const HeaderBytes& bytes, const Key& key) noexcept {
  Tag tag;
  crypto_generichash(raw(tag.data()), tag.size(), raw(bytes.data()), kHeaderBytes - kTagBytes,
                     raw(key.data()), key.size());
  return tag;
}

}  // namespace

Nonce random_nonce() {
  start_sodium();
  Nonce nonce;
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

Key random_key() {
  start_sodium();
  Key key;
  randombytes_buf(key.data(), key.size());
  return key;
}

Nonce derived_nonce(const Key& key, uint32_t rank, uint64_t count, const Nonce& theirs) {
  std::array<std::byte, 12 + kNonceBytes> context;
  for (size_t i = 0; i < 4; ++i) context[i] = static_cast<std::byte>((rank >> (8 * i)) & 0xff);
  for (size_t i = 0; i < 8; ++i) context[4 + i] = static_cast<std::byte>((count >> (8 * i)) & 0xff);
  std::copy(theirs.begin(), theirs.end(), context.begin() + 12);
  const Key all = derive(key, "nostall nonce", context);
  Nonce nonce;
  std::copy_n(all.begin(), nonce.size(), nonce.begin());
  return nonce;
}

Key key_of(std::string_view secret) {
  start_sodium();
  if (secret.size() < 16) {
    throw Error(ErrorKind::usage, "the job's secret has " + std::to_string(secret.size()) +
                                      " bytes: give it at least 16");
  }
  Key key;
  crypto_generichash(raw(key.data()), key.size(),
                     reinterpret_cast<const unsigned char*>(secret.data()), secret.size(), nullptr,
                     0);
  return key;
}

Session::Session(const Key& secret, uint32_t initiator, uint32_t responder,
                 const Nonce& initiator_nonce, const Nonce& responder_nonce)
    : initiator_(initiator) {
  start_sodium();
  std::array<std::byte, 8 + 2 * kNonceBytes> context;
  for (size_t i = 0; i < 4; ++i) {
    context[i] = static_cast<std::byte>((initiator >> (8 * i)) & 0xff);
    context[4 + i] = static_cast<std::byte>((responder >> (8 * i)) & 0xff);
  }
  for (size_t i = 0; i < kNonceBytes; ++i) {
    context[8 + i] = initiator_nonce[i];
    context[8 + kNonceBytes + i] = responder_nonce[i];
  }
  to_responder_ = derive(secret, "nostall to responder", context);
  to_initiator_ = derive(secret, "nostall to initiator", context);
}

HeaderBytes Session::seal(Header& header) noexcept {
  header.sequence = ++sent_;
  HeaderBytes bytes = encode(header);
  header.tag = tag_of(bytes, header.from == initiator_ ? to_responder_ : to_initiator_);
  return encode(header);
}

bool Session::open(const Header& header) noexcept {
  const Tag expected =
      tag_of(encode(header), header.from == initiator_ ? to_responder_ : to_initiator_);
  if (sodium_memcmp(expected.data(), header.tag.data(), kTagBytes) != 0) return false;
  const uint64_t n = header.sequence;
  if (n == 0 || n + kWindow <= highest_) return false;
  if (n > highest_) {
    // What the window passes over is forgotten: it is old from now on.
    const uint64_t steps = n - highest_ < kWindow ? n - highest_ : kWindow;
    for (uint64_t i = 1; i <= steps; ++i) seen_[(highest_ + i) % kWindow] = false;
    if (steps == kWindow) seen_.reset();
    highest_ = n;
  } else if (seen_[n % kWindow]) {
    return false;
  }
  seen_[n % kWindow] = true;
  return true;
}

}  // namespace nostall::peer
