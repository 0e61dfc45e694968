// Images and labels inside records: Datum, tf.train.Example, pickles.
#include "records/payload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../temporary.h"
#include "memory_storage.h"

namespace nostall::records {
namespace {

using namespace source;
using testing::HasSubstr;

std::string varint(uint64_t v) {
  std::string s;
  for (; v >= 0x80; v >>= 7) s += static_cast<char>(v | 0x80);
  return s + static_cast<char>(v);
}
std::string number(unsigned field, uint64_t v) { return varint(field << 3) + varint(v); }
std::string bytes(unsigned field, const std::string& s) {
  return varint(field << 3 | 2) + varint(s.size()) + s;
}
std::string from_hex(const std::string& hex) {
  std::string s;
  for (size_t i = 0; i < hex.size(); i += 2) {
    s += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return s;
}

struct Found {
  Result<Payload> payload;
  std::string image;
  int64_t label() const { return payload ? payload.value().label : -999; }
  std::string error() const { return payload ? "no error" : payload.error().what(); }
};

// The record lies between others, whose bytes must not matter.
template <typename Find>
Found find_in(const std::string& record, Find&& find) {
  const std::string before(137, '\x12'), after(50, '\x08');
  const std::string file = before + record + after;
  const MemoryStorage storage({file});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  FileWindow window(*reader, storage, 0);
  Found f{find(window, before.size(), record.size()), {}};
  if (f.payload) {
    const Payload& p = f.payload.value();
    EXPECT_GE(p.offset, before.size());
    EXPECT_LE(p.offset + p.length, before.size() + record.size());
    f.image = file.substr(p.offset, p.length);
  }
  return f;
}
Found datum(const std::string& record) { return find_in(record, find_datum); }
Found pickled(const std::string& record) { return find_in(record, find_pickled); }
Found example(const std::string& record, const std::string& label = "image/class/label") {
  return find_in(record, [&](FileWindow& w, uint64_t offset, uint64_t length) {
    return find_example(w, offset, length, "image/encoded", label);
  });
}

const std::string kImage = std::string("\xff\xd8image\0more", 12);

TEST(Datum, HoldsEncodedImagesOrPixels) {
  const Found encoded =
      datum(number(1, 3) + number(2, 0) + bytes(4, kImage) + number(5, 7) + number(7, 1));
  EXPECT_EQ(encoded.image, kImage);
  EXPECT_EQ(encoded.label(), 7);
  EXPECT_EQ(encoded.payload.value().channels, 0u);
  const Found pixels = datum(number(1, 3) + number(2, 2) + number(3, 5) +
                             bytes(4, std::string(30, 'p')) + number(5, ~uint64_t{0}));
  EXPECT_EQ(pixels.image, std::string(30, 'p'));
  EXPECT_EQ(pixels.label(), -1);
  EXPECT_EQ(pixels.payload.value().channels, 3u);
  EXPECT_EQ(pixels.payload.value().height, 2u);
  EXPECT_EQ(pixels.payload.value().width, 5u);
  // Fields that are not known, of every kind, in any order.
  const std::string strange = varint(99 << 3 | 1) + std::string(8, 'x') + varint(98 << 3 | 5) +
                              std::string(4, 'x') + bytes(1000, "xyz") + number(20, 1);
  EXPECT_EQ(datum(number(7, 1) + strange + number(5, 2) + strange + bytes(4, kImage)).image,
            kImage);
  const std::string large = random_bytes(200'000, 1);
  const Found after = datum(bytes(4, large) + number(5, 9) + number(7, 1));
  EXPECT_EQ(after.image, large);
  EXPECT_EQ(after.label(), 9);
}

TEST(Datum, RefusesWhatItIsNot) {
  EXPECT_THAT(datum("").error(), HasSubstr("has no bytes"));
  EXPECT_THAT(datum(number(5, 1) + bytes(6, "float")).error(), HasSubstr("float_data is not read"));
  EXPECT_THAT(
      datum(number(1, 3) + number(2, 2) + number(3, 6) + bytes(4, std::string(30, 'p'))).error(),
      HasSubstr("not channels x height x width long"));
  const std::string whole = number(5, 3) + bytes(4, kImage) + number(7, 1);
  for (size_t size = 3; size < whole.size() - 2; ++size) {
    EXPECT_THAT(datum(whole.substr(0, size)).error(), HasSubstr("is no Datum")) << size;
  }
  for (const std::string& wrong :
       {std::string("\x00", 1), varint(7 << 3 | 3), varint(7 << 3 | 6), std::string(11, '\xff'),
        varint(uint64_t{1} << 40), varint(4 << 3 | 2) + varint(~uint64_t{0})}) {
    EXPECT_THAT(datum(bytes(4, kImage) + number(7, 1) + wrong).error(), HasSubstr("is no Datum"));
  }
}

// 2^31 * 2^31 * 4 is 0 in 64 bits, and 2^32 + 3 is 3 in 32.
TEST(Datum, RefusesSidesThatOverflow) {
  const uint64_t two31 = uint64_t{1} << 31;
  EXPECT_THAT(datum(number(1, two31) + number(2, two31) + number(3, 4) + bytes(4, "")).error(),
              HasSubstr("width long"));
  EXPECT_THAT(datum(number(1, (uint64_t{1} << 32) + 3) + number(2, 2) + number(3, 5) +
                    bytes(4, std::string(30, 'p')))
                  .error(),
              HasSubstr("width long"));
}

std::string feature(const std::string& key, const std::string& value) {
  return bytes(1, bytes(1, key) + bytes(2, value));
}
std::string bytes_list(const std::string& s) { return bytes(1, bytes(1, s)); }
std::string packed(const std::vector<uint64_t>& values) {
  std::string s;
  for (const uint64_t v : values) s += varint(v);
  return bytes(3, bytes(1, s));
}
std::string unpacked(uint64_t v) { return bytes(3, number(1, v)); }

TEST(Example, IsNoSequenceExample) {
  const std::string context = bytes(1, feature("image/class/label", packed({7})));
  const std::string lists = bytes(2, feature("image/encoded", bytes_list(kImage)));
  EXPECT_THAT(example(context + lists).error(),
              HasSubstr("\"image/encoded\" of bytes in its context: it is a "
                        "tf.train.SequenceExample"));
  EXPECT_THAT(example(context).error(), testing::EndsWith("\"image/encoded\" of bytes"));
}

TEST(Example, HoldsAnImageAndALabel) {
  const std::string image = feature("image/encoded", bytes_list(kImage));
  for (const std::string& label :
       {packed({77}), packed({77, 5}), unpacked(77), bytes(3, number(1, 77) + number(1, 5))}) {
    for (const bool first : {true, false}) {
      const std::string l = feature("image/class/label", label);
      const Found f = example(bytes(1, feature("image/height", packed({224})) +
                                           (first ? l + image : image + l) +
                                           feature("image/class/text", bytes_list("tench"))));
      EXPECT_EQ(f.image, kImage) << f.error();
      EXPECT_EQ(f.label(), 77);
    }
  }
  const Found negative =
      example(bytes(1, image + feature("image/class/label", packed({static_cast<uint64_t>(-3)}))));
  EXPECT_EQ(negative.label(), -3);
  EXPECT_EQ(example(bytes(1, image), "").image, kImage);
  // The value before the key, as a map's entry may have it.
  EXPECT_EQ(
      example(bytes(1, bytes(1, bytes(2, bytes_list(kImage)) + bytes(1, "image/encoded"))), "")
          .image,
      kImage);
}

TEST(Example, SaysWhichFeatureIsMissing) {
  const std::string image = feature("image/encoded", bytes_list(kImage));
  EXPECT_THAT(example("").error(), HasSubstr("has no feature \"image/encoded\" of bytes"));
  EXPECT_THAT(example(bytes(1, image)).error(),
              HasSubstr("has no feature \"image/class/label\" of integers"));
  EXPECT_THAT(example(bytes(1, image + feature("image/class/label", bytes_list("7")))).error(),
              HasSubstr("of integers"));
  EXPECT_THAT(example(bytes(1, image + feature("image/class/label", packed({})))).error(),
              HasSubstr("of integers"));
  EXPECT_THAT(example(bytes(1, feature("image/encoded", packed({1})))).error(),
              HasSubstr("of bytes"));
}

TEST(Example, IsInsideItsRecord) {
  const std::string whole = bytes(1, feature("image/encoded", bytes_list(kImage)) +
                                         feature("image/class/label", packed({300})));
  ASSERT_EQ(example(whole).label(), 300);
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(example(whole.substr(0, size)).payload) << size;
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    for (unsigned value = 0; value < 256; ++value) {
      std::string bent = whole;
      bent[at] = static_cast<char>(value);
      static_cast<void>(example(bent));
    }
  }
}

TEST(Pickle, HoldsBytesAndAnInteger) {
  const std::string image = "\xff\xd8image";
  const auto expect = [&](const char* hex, int64_t label) {
    const Found f = pickled(from_hex(hex));
    EXPECT_EQ(f.image, image) << f.error();
    EXPECT_EQ(f.label(), label);
  };
  // As Python writes them, protocols 3, 4 and 5: pairs, lists, bytes alone, both orders, longs.
  expect("80034307ffd8696d61676571004b078671012e", 7);
  expect("80035d7100284307ffd8696d61676571014a70110100652e", 70000);
  expect("80034307ffd8696d61676571002e", 0);
  expect("80034afdffffff4307ffd8696d61676571008671012e", -3);
  expect("80034307ffd8696d61676571008a060000000000ff8671012e", -(int64_t{1} << 40));
  expect("8004950f000000000000004307ffd8696d616765944b0786942e", 7);
  expect("80049514000000000000005d94284307ffd8696d616765944a70110100652e", 70000);
  expect("8004950b000000000000004307ffd8696d616765942e", 0);
  expect("8005950f000000000000004307ffd8696d616765944b0786942e", 7);
  expect("80059512000000000000004afdffffff4307ffd8696d6167659486942e", -3);
  expect("80059515000000000000004307ffd8696d616765948a060000000000ff86942e", -(int64_t{1} << 40));
  // Lengths of four and of eight bytes.
  const std::string large = random_bytes(70'000, 3);
  const std::string size = from_hex("70110100");
  EXPECT_EQ(pickled("\x80\x03"
                    "B" +
                    size + large + "K\x05\x86.")
                .image,
            large);
  const Found eight =
      pickled("\x80\x04\x8e" + size + std::string(4, '\0') + large + "M\x05\x01\x86.");
  EXPECT_EQ(eight.image, large);
  EXPECT_EQ(eight.label(), 261);
}

TEST(Pickle, IsNeverExecuted) {
  // (image, os.system("touch /tmp/pwned")) in protocols 0 to 5, and bytes as the first three of
  // them write these: by a call.
  for (const char* hex :
       {"28635f636f646563730a656e636f64650a70300a2856ffd8696d6167650a70310a566c6174696e310a7032"
        "0a7470330a5270340a49370a7470350a2e",
        "8002635f636f646563730a656e636f64650a71005809000000c3bfc398696d61676571015806000000"
        "6c6174696e3171028671035271044b078671052e",
        "80034307ffd8696d616765710063706f7369780a73797374656d0a71015810000000746f756368202f746d"
        "702f70776e656471028571035271048671052e",
        "80049537000000000000004307ffd8696d616765948c05706f736978948c0673797374656d9493948c1074"
        "6f756368202f746d702f70776e6564948594529486942e",
        "80059537000000000000004307ffd8696d616765948c05706f736978948c0673797374656d9493948c1074"
        "6f756368202f746d702f70776e6564948594529486942e"}) {
    const Found f = pickled(from_hex(hex));
    ASSERT_FALSE(f.payload);
    EXPECT_EQ(f.payload.error().kind(), ErrorKind::usage);
    EXPECT_THAT(f.error(), HasSubstr("unpickling can run code"));
  }
}

TEST(Pickle, RefusesWhatCouldMeanSomethingElse) {
  // Which of two integers is the label, and which of two bytes the image?
  EXPECT_THAT(pickled("\x80\x03(C\x02"
                      "abK\x07K\x08t.")
                  .error(),
              HasSubstr("several integers"));
  EXPECT_THAT(pickled("\x80\x03(C\x02"
                      "abC\x01zK\x08t.")
                  .error(),
              HasSubstr("several bytes"));
  EXPECT_THAT(pickled(from_hex("80035d7100284302616271016801652e")).error(),
              HasSubstr("opcode 104"));
  EXPECT_THAT(pickled("\x80\x03K\x07.").error(), HasSubstr("has no bytes in it"));
}

TEST(Pickle, IsInsideItsRecord) {
  const std::string whole = from_hex("8004950f000000000000004307ffd8696d616765944b0786942e");
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(pickled(whole.substr(0, size)).payload) << size;
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    for (unsigned value = 0; value < 256; ++value) {
      std::string bent = whole;
      bent[at] = static_cast<char>(value);
      static_cast<void>(pickled(bent));
    }
  }
  EXPECT_THAT(pickled("\x80\x04\x8e" + std::string(8, '\xff') + "abc.").error(),
              HasSubstr("no sound pickle"));
  EXPECT_THAT(pickled("C\x05"
                      "abc.")
                  .error(),
              HasSubstr("no sound pickle"));
}

TEST(Payload, IsNotLookedForOutsideTheFile) {
  const MemoryStorage storage({std::string(100, 'x')});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  FileWindow window(*reader, storage, 0);
  for (const auto& [offset, length] : std::vector<std::pair<uint64_t, uint64_t>>{
           {101, 0}, {50, 51}, {~uint64_t{0}, 2}, {50, ~uint64_t{0} - 10}}) {
    for (const auto& found :
         {find_datum(window, offset, length), find_pickled(window, offset, length),
          find_example(window, offset, length, "a", "b")}) {
      ASSERT_FALSE(found);
      EXPECT_THAT(found.error().what(), HasSubstr("is not inside the file"));
    }
  }
}

TEST(Payload, PassesOnWhatTheStorageSays) {
  const std::string large = random_bytes(300'000, 1);
  const std::string records[] = {
      bytes(4, large) + number(5, 9) + number(7, 1),
      bytes(1, feature("image/encoded", bytes_list(large)) +
                   feature("image/class/label", packed({300}))),
      "\x80\x04\x8e" + from_hex("e093040000000000") + large + "K\x05\x86."};
  for (int kind = 0; kind < 3; ++kind) {
    MemoryStorage storage({records[kind]});
    storage.before = [](const RangeRead& r) { return r.offset + r.size() > 290'000 ? EIO : 0; };
    const auto reader = storage.make_reader(ReaderKind::pread, 1);
    FileWindow window(*reader, storage, 0);
    const uint64_t size = records[kind].size();
    const auto found = kind == 0 ? find_datum(window, 0, size)
                       : kind == 1
                           ? find_example(window, 0, size, "image/encoded", "image/class/label")
                           : find_pickled(window, 0, size);
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().kind(), ErrorKind::io) << found.error().what();
  }
}

}  // namespace
}  // namespace nostall::records
