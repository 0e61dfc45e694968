// Numbers as protocol buffers and MessagePack have them.
#include "fields/numbers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

namespace nostall::fields {
namespace {

using namespace std::string_literals;

std::string text(Result<Numbers> numbers) {
  if (!numbers) return numbers.error().what();
  std::string told;
  for (size_t i = 0; i < numbers.value().values.size(); i += sizeof(int32_t)) {
    int32_t value = 0;
    std::memcpy(&value, numbers.value().values.data() + i, sizeof value);
    told += std::to_string(value) + " ";
  }
  told += "(";
  for (size_t d = 0; d < numbers.value().dims; ++d) {
    told += std::to_string(numbers.value().shape[d]) + ",";
  }
  return told + ")";
}
std::string varints(const std::string& s) {
  return text(parse_varints(std::as_bytes(std::span(s)), Type::int32));
}
std::string msgpack(const std::string& s, std::vector<int64_t> wanted = {}) {
  return text(parse_msgpack(std::as_bytes(std::span(s)), Type::int32, wanted));
}

TEST(Numbers, OfProtocolBuffers) {
  EXPECT_EQ(varints(""), "(0,)");
  EXPECT_EQ(varints("\x05\x96\x01"), "5 150 (2,)");
  EXPECT_EQ(varints("\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "-1 (1,)");
  EXPECT_EQ(varints("\x80"), "its last varint does not end");
  EXPECT_EQ(varints(std::string(10, '\x80') + "\x01"), "a varint of more than ten bytes");
  EXPECT_EQ(varints("\xff\xff\xff\xff\x0f"), "a number that is none of type int32");
}

TEST(Numbers, OfMessagePack) {
  EXPECT_EQ(msgpack("\x07"), "7 ()");
  EXPECT_EQ(msgpack("\xff"), "-1 ()");
  EXPECT_EQ(msgpack("\xd1\xff\x00"s), "-256 ()");
  EXPECT_EQ(msgpack("\xcd\x01\x00"s), "256 ()");
  EXPECT_EQ(msgpack("\xcb\x40\x08\x00\x00\x00\x00\x00\x00"s), "3 ()");
  EXPECT_EQ(msgpack("\x92\x93\x01\x02\x03\xdc\x00\x03\x04\x05\x06"s), "1 2 3 4 5 6 (2,3,)");
  EXPECT_EQ(msgpack("\x90", {kRagged, 4}), "(0,4,)");
  EXPECT_EQ(msgpack("\x92\x90\x90"), "(2,0,)");
  const std::string uneven = "its lists are not all of one shape";
  for (const std::string& bad :
       {"\x92\x91\x01\x90"s, "\x92\x90\x91\x01"s, "\x92\x01\x91\x01"s, "\x92\x91\x01\x01"s,
        "\x92\x90\x01"s, "\x92\x91\x91\x01\x91\x01"s}) {
    EXPECT_EQ(msgpack(bad), uneven) << testing::PrintToString(bad);
  }
  EXPECT_EQ(msgpack("\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00"s),
            "a number that is none of type int32");
  EXPECT_EQ(msgpack("\xce\xff\xff\xff\xff"), "a number that is none of type int32");
  EXPECT_EQ(msgpack("\x92\x01"), "its list is cut off");
  EXPECT_EQ(msgpack("\xdd\xff\xff\xff\xff"), "its list is cut off");
  EXPECT_EQ(msgpack("\xcd\x01"), "its number is cut off");
  EXPECT_EQ(msgpack("\xa1x"), "neither a number nor a list of numbers");
  EXPECT_EQ(msgpack("\x01\x01"), "bytes behind its number or list");
  EXPECT_EQ(msgpack(std::string(9, '\x91') + "\x01"), "it has too many dimensions");
}

}  // namespace
}  // namespace nostall::fields
