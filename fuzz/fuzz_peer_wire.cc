// Headers from strangers: every input is a Header or an Error, what is accepted is encoded back to
// the same bytes, and a session opens nothing that it did not seal.
#include <cstdlib>
#include <cstring>

#include "peer/session.h"
#include "peer/wire.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nostall::peer;
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto header = decode(bytes);
  if (!header) return 0;
  const HeaderBytes again = encode(header.value());
  if (std::memcmp(again.data(), bytes.data(), kHeaderBytes) != 0) std::abort();
  static const Key secret = key_of("the fuzzer does not know this");
  static Session session(secret, 0, 1, Nonce{}, Nonce{});
  if (session.open(header.value())) std::abort();
  return 0;
}
