// Members of tar archives: the dialects, and damage.
#include "records/tar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "../temporary.h"
#include "memory_storage.h"
#include "records/build.h"

namespace nostall::records {
namespace {

using namespace source;
using testing::HasSubstr;

struct Header {
  std::string name;
  uint64_t size = 0;
  char type = '0';
  std::string prefix{}, link{};
  bool gnu = false, v7 = false, signed_sum = false, binary_size = false;
};

std::string block(const Header& h) {
  std::string b(512, '\0');
  const auto put = [&b](size_t at, const std::string& text) { b.replace(at, text.size(), text); };
  const auto octal = [](uint64_t value, int digits) {
    char text[32];
    std::snprintf(text, sizeof text, "%0*llo", digits, static_cast<unsigned long long>(value));
    return std::string(text);
  };
  put(0, h.name.substr(0, 100));
  put(100, "0000644");
  if (h.binary_size) {
    b[124] = static_cast<char>(0x80);
    for (int i = 0; i < 8; ++i) b[size_t(128 + i)] = static_cast<char>(h.size >> (8 * (7 - i)));
  } else {
    put(124, octal(h.size, 11));
  }
  put(136, "00000000000");
  b[156] = h.type;
  put(157, h.link.substr(0, 100));
  if (!h.v7)
    put(257, h.gnu ? std::string("ustar  \0", 8)
                   : std::string("ustar\0"
                                 "00",
                                 8));
  put(345, h.prefix);
  put(148, "        ");
  uint64_t sum = 0;
  int64_t signed_sum = 0;
  for (const char c : b) {
    sum += uint8_t(c);
    signed_sum += static_cast<signed char>(c);
  }
  put(148,
      octal(h.signed_sum ? static_cast<uint64_t>(signed_sum) : sum, 6) + std::string("\0 ", 2));
  return b;
}

std::string padded(std::string content) {
  content.resize((content.size() + 511) / 512 * 512);
  return content;
}
std::string member(Header h, const std::string& content) {
  h.size = content.size();
  return block(h) + padded(content);
}
std::string pax(const std::vector<std::pair<std::string, std::string>>& values, char type = 'x') {
  std::string text;
  for (const auto& [key, value] : values) {
    size_t length = key.size() + value.size() + 3;
    while (std::to_string(length).size() + key.size() + value.size() + 3 != length) {
      length = std::to_string(length).size() + key.size() + value.size() + 3;
    }
    text += std::to_string(length) + " " + key + "=" + value + "\n";
  }
  return member({"PaxHeader", 0, type}, text);
}
const std::string kEnd(1024, '\0');

Result<std::vector<TarMember>> scan_bytes(const std::string& bytes, std::string_view keep = {}) {
  const MemoryStorage storage({bytes});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  FileWindow window(*reader, storage, 0);
  return scan_tar(window, keep);
}

using Found = std::vector<std::pair<std::string, std::string>>;
Found found(std::string bytes) {
  bytes += kEnd;
  auto result = scan_bytes(bytes);
  if (!result) return {{"error", result.error().what()}};
  Found names;
  for (const TarMember& m : result.value()) {
    EXPECT_LE(m.offset + m.size, bytes.size());
    const bool unread = m.kind == TarKind::unread_link;
    names.emplace_back(m.name, unread ? "unread" : bytes.substr(m.offset, m.size));
  }
  return names;
}
std::string error_of(const std::string& bytes, ErrorKind kind = ErrorKind::corruption) {
  const auto result = scan_bytes(bytes);
  if (result) return "no error";
  EXPECT_EQ(result.error().kind(), kind);
  return result.error().what();
}

TEST(Tar, FindsTheMembersOfAShard) {
  const std::string image = random_bytes(1234, 1);
  const std::string bytes = member({"a/1.jpg"}, image) + member({"a/1.cls"}, "42\n") +
                            member({"empty"}, "") + member({"exact"}, std::string(512, 'x'));
  EXPECT_EQ(found(bytes), (Found{{"a/1.jpg", image},
                                 {"a/1.cls", "42\n"},
                                 {"empty", ""},
                                 {"exact", std::string(512, 'x')}}));
  const auto kept = scan_bytes(bytes + kEnd, ".cls");
  ASSERT_TRUE(kept);
  EXPECT_EQ(kept.value()[1].content, "42\n");
  EXPECT_EQ(kept.value()[0].content, "");
  EXPECT_EQ(found(""), Found{});
  EXPECT_EQ(found(kEnd), Found{});
}

TEST(Tar, ScansAllArchivesOfAStorageInOrder) {
  const std::vector<std::string> contents = {member({"a.jpg"}, "1") + member({"a.cls"}, "7") + kEnd,
                                             member({"b.jpg"}, "22") + kEnd};
  const MemoryStorage storage(contents);
  uint64_t done = 0;
  const TarMembers m = scan_tars(storage, ".cls", 2, [&](uint64_t n) { done = n; });
  EXPECT_EQ(m.file, (std::vector<uint32_t>{0, 0, 1}));
  EXPECT_EQ(m.names, (std::vector<std::string>{"a.jpg", "a.cls", "b.jpg"}));
  EXPECT_EQ(m.contents, (std::vector<std::string>{"", "7", ""}));
  EXPECT_EQ(m.size, (std::vector<uint64_t>{1, 1, 2}));
  EXPECT_EQ(contents[1].substr(m.offset[2], m.size[2]), "22");
  EXPECT_EQ(done, 2u);
  const MemoryStorage damaged({contents[0], contents[1].substr(0, 700)});
  EXPECT_THROW(scan_tars(damaged, "", 2), Error);
}

TEST(Tar, KnowsTheWaysOfWritingNames) {
  const std::string full(100, 'n'), long_name = std::string(300, 'd') + "/file";
  EXPECT_EQ(found(member({full}, "1")), (Found{{full, "1"}}));
  EXPECT_EQ(found(member({"b", 0, '0', "deep/folder"}, "1")), (Found{{"deep/folder/b", "1"}}));
  // Where GNU's headers have times.
  Header gnu{"b", 0, '0', "12345670123"};
  gnu.gnu = true;
  EXPECT_EQ(found(member(gnu, "1")), (Found{{"b", "1"}}));
  const std::string longer = member({"././@LongLink", 0, 'L'}, long_name + '\0');
  const std::string link = member({"././@LongLink", 0, 'K'}, std::string(200, 'k') + '\0');
  EXPECT_EQ(found(longer + link + member({"cut"}, "1") + member({"next"}, "2")),
            (Found{{long_name, "1"}, {"next", "2"}}));
  EXPECT_EQ(found(pax({{"path", long_name}, {"mtime", "1.5"}}) + member({"cut"}, "1") +
                  member({"next"}, "2")),
            (Found{{long_name, "1"}, {"next", "2"}}));
  EXPECT_EQ(found(pax({{"comment", "x"}}, 'g') + member({"a"}, "1")), (Found{{"a", "1"}}));
  EXPECT_EQ(found(pax({{"path", ""}}) + member({"a"}, "1")), (Found{{"a", "1"}}));
  Header v7{"old"};
  v7.v7 = true;
  v7.type = '\0';
  EXPECT_EQ(found(member(v7, "1")), (Found{{"old", "1"}}));
  Header umlaut{"\xc3\xa4"};
  umlaut.signed_sum = true;
  EXPECT_EQ(found(member(umlaut, "1")), (Found{{"\xc3\xa4", "1"}}));
}

TEST(Tar, PassesOverWhatIsNoFile) {
  // Their sizes are those of something else, and no bytes of theirs follow.
  for (const char type : {'3', '4', '5', '6'}) {
    EXPECT_EQ(found(block({"other", 5000, type}) + member({"a"}, "1")), (Found{{"a", "1"}}))
        << type;
  }
  Header folder{"folder/", 0, '\0'};
  folder.v7 = true;
  EXPECT_EQ(found(block(folder) + member({"folder/a"}, "1")), (Found{{"folder/a", "1"}}));
  // Kinds that are not known have bytes.
  EXPECT_EQ(found(member({"label", 0, 'V'}, "abc") + member({"a"}, "1")), (Found{{"a", "1"}}));
}

std::string link(const std::string& name, const std::string& to, char type = '1') {
  // The size is that of the file, and no bytes follow.
  return block({name, 5000, type, "", to});
}

TEST(Tar, FollowsHardLinksToFilesBeforeThem) {
  const std::string far(300, 'f'), two = member({"2.jpg"}, "two") + member({"2.cls"}, "2");
  const std::string bytes = member({"1.jpg"}, "one") + member({"1.CLS"}, "1") + two +
                            link("3.jpg", "1.jpg") + link("3.cls", "1.CLS") +
                            link("4.jpg", "3.jpg") + member({"5.jpg"}, "five");
  EXPECT_EQ(found(bytes), (Found{{"1.jpg", "one"},
                                 {"1.CLS", "1"},
                                 {"2.jpg", "two"},
                                 {"2.cls", "2"},
                                 {"3.jpg", "one"},
                                 {"3.cls", "1"},
                                 {"4.jpg", "one"},
                                 {"5.jpg", "five"}}));
  const auto kept = scan_bytes(bytes + kEnd, ".cls");
  ASSERT_TRUE(kept);
  EXPECT_EQ(kept.value()[0].content, "");
  EXPECT_EQ(kept.value()[1].content, "1");
  EXPECT_EQ(kept.value()[5].content, "1");
  EXPECT_EQ(kept.value()[4].kind, TarKind::hard_link);
  EXPECT_EQ(kept.value()[7].kind, TarKind::file);
  // Names that a header has no room for.
  const std::string gnu = member({"././@LongLink", 0, 'L'}, far + '\0') + member({"cut"}, "1") +
                          member({"././@LongLink", 0, 'K'}, far + '\0') + link("a", "cut") +
                          link("b", "cut");
  EXPECT_EQ(found(gnu), (Found{{far, "1"}, {"a", "1"}, {"b", "unread"}}));
  EXPECT_EQ(found(pax({{"path", far}}) + member({"cut"}, "1") + pax({{"linkpath", far}}) +
                  link("a", "cut")),
            (Found{{far, "1"}, {"a", "1"}}));
  // As when it is unpacked.
  EXPECT_EQ(found(member({"a"}, "1") + member({"a"}, "2") + link("b", "a")),
            (Found{{"a", "1"}, {"a", "2"}, {"b", "2"}}));
}

// As tar does for a file that it is given twice; unpacking them changes nothing.
TEST(Tar, LeavesOutHardLinksToTheFileThatTheirPathHas) {
  const std::string a = member({"a"}, "1"), empty = member({"e"}, "");
  for (const std::string& again : {link("a", "a"), link("./a", "a"), link("a", ".//a")}) {
    EXPECT_EQ(found(a + again + member({"b"}, "2")), (Found{{"a", "1"}, {"b", "2"}}));
  }
  EXPECT_EQ(found(a + link("b", "a") + link("b", "a") + link("a", "b") + link("b", "b")),
            (Found{{"a", "1"}, {"b", "1"}}));
  EXPECT_EQ(found(empty + link("e", "e")), (Found{{"e", ""}}));
  // Here it changes something.
  EXPECT_EQ(found(a + member({"b"}, "1") + link("b", "a")),
            (Found{{"a", "1"}, {"b", "1"}, {"b", "1"}}));
}

TEST(Tar, TellsOfLinksThatItDoesNotFollow) {
  const std::string a = member({"a"}, "1");
  for (const std::string& bytes :
       {link("b", "a") + a, link("b", "b") + a, link("b", "") + a, link("b", "./a") + a,
        link("b", "a", '2') + a, block({"a/", 0, '5'}) + link("b", "a/") + a}) {
    EXPECT_EQ(found(bytes), (Found{{"b", "unread"}, {"a", "1"}}));
  }
  EXPECT_EQ(found(a + link("b", "a", '2') + link("c", "b")),
            (Found{{"a", "1"}, {"b", "unread"}, {"c", "unread"}}));
}

TEST(Tar, KnowsSizesOfManyGigabytes) {
  const TemporaryFolder folder;
  const uint64_t huge = uint64_t{9} << 30;
  Header binary{"binary", huge};
  binary.binary_size = true;
  for (const std::string& start :
       {block(binary), pax({{"size", std::to_string(huge)}}) + block({"pax", 0})}) {
    const std::string path = folder.write("huge.tar", start);
    const uint64_t next = start.size() + huge;
    std::filesystem::resize_file(path, next);
    std::ofstream(path, std::ios::binary | std::ios::app) << member({"after"}, "12345") + kEnd;
    const auto storage = open_files({path});
    const auto reader = storage->make_reader(ReaderKind::pread, 1);
    FileWindow window(*reader, *storage, 0);
    const auto members = scan_tar(window);
    ASSERT_TRUE(members) << members.error().what();
    ASSERT_EQ(members.value().size(), 2u);
    EXPECT_EQ(members.value()[0].size, huge);
    EXPECT_EQ(members.value()[1].name, "after");
    EXPECT_EQ(members.value()[1].offset, next + 512);
    EXPECT_LT(reader->bytes_read(), 1u << 20);
    std::filesystem::remove(path);
  }
}

TEST(Tar, RefusesHolesByName) {
  EXPECT_THAT(error_of(member({"holes", 0, 'S'}, "x"), ErrorKind::usage),
              HasSubstr("\"holes\" has"));
  EXPECT_THAT(
      error_of(pax({{"GNU.sparse.major", "1"}, {"GNU.sparse.minor", "0"}}) + member({"holes"}, "x"),
               ErrorKind::usage),
      HasSubstr("make the archive without --sparse"));
}

TEST(Tar, TellsWhereItIsDamaged) {
  const std::string first = member({"a"}, "1"), second = member({"b"}, std::string(700, '2'));
  for (size_t at = 0; at < 512; ++at) {
    std::string bent = first + second + kEnd;
    bent[1024 + at] = static_cast<char>(bent[1024 + at] ^ 0x21);
    const auto result = scan_bytes(bent);
    // The end of the checksum's field is not part of any number.
    if (at >= 154 && at < 156) continue;
    ASSERT_FALSE(result) << at;
    EXPECT_THAT(result.error().what(), HasSubstr("damaged header at offset 1024"));
  }
  for (const size_t size : {1025u, 1535u}) {
    EXPECT_THAT(error_of((first + second).substr(0, size)), HasSubstr("middle of a header"));
  }
  EXPECT_THAT(error_of((first + second).substr(0, 1536 + 699)),
              HasSubstr("member \"b\" of 700 bytes is cut off"));
  Header far{"far", ~uint64_t{0} >> 9};
  far.binary_size = true;
  EXPECT_THAT(error_of(block(far)), HasSubstr("cut off"));
  far.size = ~uint64_t{0};
  EXPECT_THAT(error_of(block(far)), HasSubstr("damaged header"));
  EXPECT_THAT(error_of(std::string(2000, 'x')), HasSubstr("damaged header at offset 0"));
}

TEST(Tar, RefusesWhatFollowsItsEnd) {
  const std::string one = member({"a"}, "1"), two = member({"b"}, "2");
  EXPECT_THAT(error_of(one + kEnd + two + kEnd), HasSubstr("more follows its end mark"));
  std::string lost = one + two + member({"c"}, "3") + kEnd;
  std::fill_n(lost.begin() + 1024, 512, '\0');
  EXPECT_THAT(error_of(lost), HasSubstr("at offset 1024"));
  // Writers fill up their last record.
  EXPECT_TRUE(scan_bytes(one + kEnd + std::string(300'000, '\0')));
}

TEST(Tar, RefusesDamagedExtendedHeaders) {
  for (const std::string text :
       {"5 a=b\n", "99999 path=a\n", "abc", "10 path=a!", "8 pathaa\n", "3 \n", "0 a=b\n",
        "-5 a=b\n", "11 size=-1\n", "11 size=1x\n", "18446744073709551616 a=b\n", " 6 a=b\n"}) {
    EXPECT_THAT(error_of(member({"PaxHeader", 0, 'x'}, text) + member({"a"}, "1")),
                HasSubstr("damaged pax header"))
        << text;
  }
  EXPECT_THAT(error_of(pax({{"size", "600"}}) + member({"a"}, "1")), HasSubstr("cut off"));
}

// One header may give its name to every member that follows.
TEST(Tar, RefusesNamesThatWouldMultiply) {
  const std::string name(100'000, 'n');
  std::string bytes = pax({{"path", name}}, 'g');
  for (int i = 0; i < 100; ++i) bytes += member({"a"}, "");
  EXPECT_THAT(error_of(bytes), HasSubstr("a name of 100000 bytes"));
  EXPECT_THAT(error_of(member({"x", 0, 'L'}, std::string(2 << 20, 'n')) + member({"a"}, "")),
              HasSubstr("a name or extended header of 2097152 bytes"));
  // Other values may be long: access lists, colours of a file manager.
  EXPECT_EQ(found(pax({{"SCHILY.xattr.x", name}}) + member({"a"}, "1")), (Found{{"a", "1"}}));
}

TEST(Tar, PassesOnWhatTheStorageSays) {
  MemoryStorage storage(
      {member({"a"}, "1") + member({"b"}, std::string(100'000, 'x')) + member({"c"}, "2") + kEnd});
  storage.before = [](const RangeRead& r) { return r.offset > 0 ? EIO : 0; };
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  FileWindow window(*reader, storage, 0);
  const auto result = scan_tar(window);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().kind(), ErrorKind::io);
  EXPECT_THAT(result.error().what(), HasSubstr("cannot read memory/0 at offset"));
}

}  // namespace
}  // namespace nostall::records
