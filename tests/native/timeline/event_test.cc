// Events of traces: fields in any order, exact times, damaged and nested values.
#include "timeline/event.h"

#include <gtest/gtest.h>

#include <string>

namespace nostall::timeline {
namespace {

Event parsed(const std::string& text) {
  static std::string kept;
  kept = text;
  Event event;
  EXPECT_EQ(parse_event(kept, event), Parsed::event) << text;
  return event;
}

TEST(Event, FieldsAreFoundInAnyOrderAmongOthers) {
  const Event event = parsed(
      R"({"args": {"sort": [1, {"a": "}"}], "dtype": "float32", "shape": "[2, 3]"}, "ts": 12, )"
      R"("x": null, "name": "N", "pid" : 7 , "ph":"E", "cat": "c", "dur": 3.5} , tail)");
  EXPECT_EQ(event.phase, 'E');
  EXPECT_EQ(event.pid, 7);
  EXPECT_EQ(event.time, 12'000);
  EXPECT_EQ(event.duration, 3'500);
  EXPECT_EQ(event.name, "N");
  EXPECT_EQ(event.category, "c");
  EXPECT_EQ(event.dtype, "float32");
  EXPECT_EQ(event.shape, "[2, 3]");
  EXPECT_EQ(event.raw.back(), '}');
}

TEST(Event, TimesAreExactToTheNanosecondAndHugeOnesAreNone) {
  EXPECT_EQ(parsed(R"({"ts": 4388845073304.2579})").time, 4388845073304257);
  EXPECT_EQ(parsed(R"({"ts": -1.5})").time, -1500);
  EXPECT_EQ(parsed(R"({"ts": 1.25e3})").time, 1'250'000);
  EXPECT_EQ(parsed(R"({"ts": 9000000000000001})").time, kNoTime);
  EXPECT_EQ(parsed(R"({"ts": 1e400})").time, kNoTime);
  EXPECT_EQ(parsed(R"({"ts": "12"})").time, kNoTime);
  EXPECT_EQ(parsed(R"({"ts": true})").time, kNoTime);
  EXPECT_EQ(parsed(R"({"pid": "Traces"})").pid, -1);
}

TEST(Event, WhatIsNoObjectIsToldFromWhatIsCut) {
  Event event;
  const std::string whole = R"({"name": "a\"b", "args": {"x": [1, {"y": {}}]}, "ts": 1})";
  EXPECT_EQ(parse_event(whole, event), Parsed::event);
  for (size_t cut = 0; cut < whole.size(); ++cut) {
    EXPECT_EQ(parse_event(std::string_view(whole).substr(0, cut), event), Parsed::more) << cut;
  }
  for (const char* bad :
       {"{1}", "{\"a\" 1}", "{\"a\": }", "{\"a\": 1,, }", "{\"a\": [1}]}", "{]"}) {
    EXPECT_EQ(parse_event(bad, event), Parsed::bad) << bad;
  }
}

TEST(Event, DeepNestingIsRefusedWithoutRecursion) {
  Event event;
  std::string deep = "{\"a\": ";
  for (int i = 0; i < 100'000; ++i) deep += "[";
  EXPECT_EQ(parse_event(deep, event), Parsed::bad);
}

TEST(Event, ContainersOpenAtTheirEvents) {
  Event event;
  const std::string text = R"({"a": {"b": [1]}, "traceEvents": [{"ph": "B"}]})";
  EXPECT_EQ(parse_event(text, event), Parsed::container);
  EXPECT_EQ(event.raw.back(), '[');
}

TEST(Event, EscapesBecomeCharacters) {
  EXPECT_EQ(unescape(R"(a\"b\\c\/d\ne\u00e9\ud83d\ude00)"), "a\"b\\c/d\ne\xc3\xa9\xf0\x9f\x98\x80");
  EXPECT_EQ(unescape(R"(\ud83d x \u12)"), "\xef\xbf\xbd x u12");
}

TEST(Event, SizesOfTensors) {
  EXPECT_EQ(tensor_bytes("float32", "[9216, 128]"), 9216 * 128 * 4);
  EXPECT_EQ(tensor_bytes("bfloat16", "[7]"), 14);
  EXPECT_EQ(tensor_bytes("float64", "[]"), 8);
  EXPECT_EQ(tensor_bytes("float32", "[0, 5]"), 0);
  for (const char* shape : {"", "[", "9", "[-1]", "[a]", "[1,,2]", "[4294967296, 4294967296]"}) {
    EXPECT_EQ(tensor_bytes("float32", shape), -1) << shape;
  }
  EXPECT_EQ(tensor_bytes("string", "[1]"), -1);
}

}  // namespace
}  // namespace nostall::timeline
