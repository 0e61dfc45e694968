// Authenticated messages: every changed byte is noticed, and each message is taken once.
#include "peer/session.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace nostall::peer {
namespace {

struct Pair {
  Nonce a = random_nonce(), b = random_nonce();
  Session initiator{key_of("sixteen bytes or more"), 3, 4, a, b};
  Session responder{key_of("sixteen bytes or more"), 3, 4, a, b};

  static Header from(uint32_t rank) {
    Header header;
    header.kind = Kind::fetch;
    header.from = rank;
    header.to = rank == 3 ? 4 : 3;
    return header;
  }
};

TEST(Session, OpensWhatTheOtherEndSealedOnce) {
  Pair pair;
  for (int i = 0; i < 10; ++i) {
    Header there = Pair::from(3), back = Pair::from(4);
    pair.initiator.seal(there);
    pair.responder.seal(back);
    EXPECT_TRUE(pair.responder.open(there));
    EXPECT_FALSE(pair.responder.open(there));
    EXPECT_TRUE(pair.initiator.open(back));
  }
}

TEST(Session, NoticesEveryChangedByte) {
  Pair pair;
  Header header = Pair::from(3);
  const HeaderBytes sealed = pair.initiator.seal(header);
  for (size_t i = 0; i < kHeaderBytes; ++i) {
    HeaderBytes changed = sealed;
    changed[i] ^= std::byte{1};
    const Result<Header> read = decode(changed);
    if (read) {
      EXPECT_FALSE(pair.responder.open(read.value())) << i;
    }
  }
  EXPECT_TRUE(pair.responder.open(header));
}

TEST(Session, MessagesMayOvertakeEachOtherWithinAWindow) {
  Pair pair;
  std::vector<Header> sent(6000, Pair::from(3));
  for (Header& header : sent) pair.initiator.seal(header);
  EXPECT_TRUE(pair.responder.open(sent[1000]));
  EXPECT_TRUE(pair.responder.open(sent[10]));
  EXPECT_FALSE(pair.responder.open(sent[10]));
  EXPECT_TRUE(pair.responder.open(sent[5999]));
  EXPECT_FALSE(pair.responder.open(sent[11]));  // too old to know
  EXPECT_TRUE(pair.responder.open(sent[5000]));
  EXPECT_FALSE(pair.responder.open(sent[5000]));
}

TEST(Session, AnotherSecretOrNonceOrRankOpensNothing) {
  Pair pair;
  Header header = Pair::from(3);
  pair.initiator.seal(header);
  EXPECT_FALSE(Session(key_of("another secret, also long"), 3, 4, pair.a, pair.b).open(header));
  EXPECT_FALSE(Session(key_of("sixteen bytes or more"), 3, 4, pair.a, pair.a).open(header));
  EXPECT_FALSE(Session(key_of("sixteen bytes or more"), 3, 5, pair.a, pair.b).open(header));
  EXPECT_THROW(key_of("short"), Error);
}

TEST(Wire, GoldenHeader) {
  Header header;
  header.kind = Kind::reply;
  header.status = Status::never;
  header.from = 1;
  header.to = 0x01020304;
  header.sequence = 5;
  header.request = 6;
  header.sample = 0x1122334455667788;
  header.progress = ~uint64_t{0};
  header.length = 9;
  header.crc = 0xdeadbeef;
  header.nonce[0] = std::byte{0xaa};
  header.tag[15] = std::byte{0xbb};
  const HeaderBytes bytes = encode(header);
  const std::array<uint8_t, kHeaderBytes> golden = {
      'N',  'S',  'P',  'R',  2,    0,    6,    2,    1,    0,    0,    0,    4,   3,   2,   1,
      5,    0,    0,    0,    0,    0,    0,    0,    6,    0,    0,    0,    0,   0,   0,   0,
      0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 255,  255,  255,  255,  255, 255, 255, 255,
      9,    0,    0,    0,    0,    0,    0,    0,    0xef, 0xbe, 0xad, 0xde, 0,   0,   0,   0,
      0xaa, 0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,   0,   0,   0,
      0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,   0,   0,   0xbb};
  for (size_t i = 0; i < kHeaderBytes; ++i) {
    EXPECT_EQ(std::to_integer<uint8_t>(bytes[i]), golden[i]) << i;
  }
  const Header read = decode(bytes).take();
  EXPECT_EQ(encode(read), bytes);
}

}  // namespace
}  // namespace nostall::peer
