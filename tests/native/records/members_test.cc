// Named values inside records: tf.train.Example, .npz, MessagePack.
#include "records/members.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory_storage.h"

namespace nostall::records {
namespace {

using namespace std::string_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

std::string field(unsigned number, const std::string& s) {
  return std::string{static_cast<char>(number << 3 | 2), static_cast<char>(s.size())} + s;
}
std::string feature(const std::string& name, unsigned list, const std::string& values) {
  return field(1, field(1, name) + field(2, field(list, values)));
}

// name, type, the bytes of each member; "*" behind the type of lists.
std::vector<std::string> members_of(const std::string& record, MembersKind kind,
                                    const std::vector<std::string>& names = {}) {
  const std::string before(5, '\x12');
  const std::string file = before + record + "behind";
  const MemoryStorage storage({file});
  const auto reader = storage.make_reader(source::ReaderKind::pread, 1);
  FileWindow window(*reader, storage, 0);
  auto found = find_members(window, before.size(), record.size(), kind, names);
  if (!found) return {found.error().what()};
  std::vector<std::string> told;
  for (const Member& m : found.value()) {
    const bool there = m.type != MemberType::none && m.type != MemberType::unread;
    told.push_back(m.name + " " + std::string(name_of(m.type)) + (m.list ? "*" : "") + " " +
                   (there ? file.substr(m.offset, m.length) : ""));
  }
  return told;
}

TEST(Members, OfAnExample) {
  const std::string record =
      field(1, feature("b", 1, field(1, "blob")) + feature("f", 2, field(1, "12345678")) +
                   feature("i", 3, field(1, "\x05\x96\x01")) + feature("one", 3, "\x08\x96\x01") +
                   feature("two", 1, field(1, "x") + field(1, "y")) + feature("none", 1, "") +
                   feature("empty", 3, ""));
  EXPECT_THAT(members_of(record, MembersKind::example),
              ElementsAre("b bytes blob", "f floats* 12345678", "i varints* \x05\x96\x01",
                          "one varints* \x96\x01", "two unread ", "none none ", "empty varints* "));
  for (size_t size = 1; size < record.size(); ++size) {
    EXPECT_THAT(members_of(record.substr(0, size), MembersKind::example),
                ElementsAre(HasSubstr("is no tf.train.Example")));
  }
}

// Whose lists of features are none of an Example's.
TEST(Members, OfTheContextOfASequenceExample) {
  const std::string record =
      field(1, feature("b", 1, field(1, "blob"))) + field(2, feature("frames", 1, field(1, "x")));
  EXPECT_THAT(members_of(record, MembersKind::example, {"b"}), ElementsAre("b bytes blob"));
  for (const std::vector<std::string>& names :
       {std::vector<std::string>{}, {"frames"}, {"b", "frames"}}) {
    EXPECT_THAT(members_of(record, MembersKind::example, names),
                ElementsAre(HasSubstr("is a tf.train.SequenceExample, whose feature list "
                                      "\"frames\" is not read")));
  }
  EXPECT_THAT(
      members_of(field(1, feature("b", 1, field(1, "blob"))) + field(2, ""), MembersKind::example),
      ElementsAre("b bytes blob"));
  // A name of both is the context's, wherever that lies; all would be both.
  const std::string context = field(1, feature("b", 1, field(1, "blob")));
  const std::string lists =
      field(2, feature("b", 1, field(1, "x")) + feature("frames", 1, field(1, "y")));
  for (const std::string& both : {context + lists, lists + context}) {
    EXPECT_THAT(members_of(both, MembersKind::example, {"b"}), ElementsAre("b bytes blob"));
    EXPECT_THAT(members_of(both, MembersKind::example, {"b", "frames"}),
                ElementsAre(HasSubstr("feature list \"frames\" is not read")));
    EXPECT_THAT(members_of(both, MembersKind::example),
                ElementsAre(HasSubstr("feature list \"b\" is not read")));
  }
  EXPECT_THAT(members_of(lists, MembersKind::example, {"b"}),
              ElementsAre(HasSubstr("feature list \"b\" is not read")));
}

TEST(Members, OfMessagePack) {
  const std::string map = "\x86\xa1"s + "i\x2a" + "\xa1" + "t\xa2hi" + "\xa1" +
                          "b\xc4\x03\x01\x02\x03"s + "\xa1" + "l\x92\x01\xca\x3f\x80\x00\x00"s +
                          "\xa1" + "m\x81\xa1n\xc0"s + "\x07\x92\xa1x\x01"s;
  EXPECT_THAT(members_of(map, MembersKind::msgpack),
              ElementsAre("i integer \x2a", "t text hi", "b bytes \x01\x02\x03",
                          "l real* \x92\x01\xca\x3f\x80\x00\x00"s, "m.n none ", "7 unread* "));
  EXPECT_THAT(members_of("\x92\x01\xc3"s, MembersKind::msgpack),
              ElementsAre("0 integer \x01", "1 boolean \xc3"));
  for (size_t size = 0; size < map.size(); ++size) {
    EXPECT_THAT(members_of(map.substr(0, size), MembersKind::msgpack),
                ElementsAre(HasSubstr("is no MessagePack map")));
  }
  const std::string deep(100, '\x91');
  EXPECT_THAT(members_of(deep + "\x01", MembersKind::msgpack),
              ElementsAre(HasSubstr("is no MessagePack map")));
}

TEST(Members, NamesOfMapsInMapsAreNotLongerThanOthers) {
  const auto key = [](size_t size) {
    return "\xda"s + static_cast<char>(size >> 8) + static_cast<char>(size) +
           std::string(size, 'k');
  };
  const auto nested = [&](size_t outer, size_t inner) {
    return "\x81" + key(outer) + "\x81" + key(inner) + "\x01";
  };
  EXPECT_THAT(members_of(nested(4000, 95), MembersKind::msgpack),
              ElementsAre(HasSubstr(" integer \x01")));
  EXPECT_THAT(members_of(nested(4000, 96), MembersKind::msgpack),
              ElementsAre(HasSubstr("is no MessagePack map")));
}

TEST(Members, OfWhichThereAreTooManyAreReadByName) {
  const std::string most = "\xdc\x04\x00"s + std::string(1024, '\x07');
  EXPECT_THAT(members_of(most, MembersKind::msgpack), SizeIs(1024));
  const std::string more = "\xdc\x04\x01"s + std::string(1025, '\x07');
  EXPECT_THAT(members_of(more, MembersKind::msgpack),
              ElementsAre(HasSubstr("has more than 1024 values: name the fields")));
  EXPECT_THAT(members_of(more, MembersKind::msgpack, {"1024", "3"}),
              ElementsAre("3 integer \x07", "1024 integer \x07"));
  // Of an Example, whose map of features comes again.
  std::string example;
  for (unsigned i = 0; i < 1025; ++i) {
    example += field(1, feature(std::to_string(i), 3, field(1, "\x05")));
  }
  EXPECT_THAT(members_of(example, MembersKind::example),
              ElementsAre(HasSubstr("has more than 1024 values: name the fields")));
  EXPECT_THAT(members_of(example, MembersKind::example, {"9"}), ElementsAre("9 varints* \x05"));
}

TEST(Members, OfAnArchive) {
  // One stored and one deflated member, as Python's zipfile has them.
  const auto le = [](unsigned value, unsigned size) {
    std::string s;
    for (unsigned i = 0; i < size; ++i) s += static_cast<char>(value >> (8 * i));
    return s;
  };
  const auto local = [&](const std::string& name, const std::string& extra) {
    return "PK\x03\x04"s + std::string(22, '\0') + le(static_cast<unsigned>(name.size()), 2) +
           le(static_cast<unsigned>(extra.size()), 2) + name + extra;
  };
  const auto entry = [&](const std::string& name, unsigned method, unsigned size, unsigned at) {
    return "PK\x01\x02"s + std::string(6, '\0') + le(method, 2) + std::string(8, '\0') +
           le(size, 4) + le(size, 4) + le(static_cast<unsigned>(name.size()), 2) +
           std::string(12, '\0') + le(at, 4) + name;
  };
  const std::string first = local("a.npy", "more") + "array";
  const std::string files = first + local("b.npy", "") + "squeezed";
  const std::string directory =
      entry("a.npy", 0, 5, 0) + entry("b.npy", 8, 8, static_cast<unsigned>(first.size()));
  const auto archive = [&](const std::string& contents) {
    return contents + directory + "PK\x05\x06"s + std::string(4, '\0') + le(2, 2) + le(2, 2) +
           le(static_cast<unsigned>(directory.size()), 4) +
           le(static_cast<unsigned>(contents.size()), 4) + le(0, 2);
  };
  const std::string whole = archive(files);
  EXPECT_THAT(members_of(whole, MembersKind::npz), ElementsAre("a npy array", "b unread "));
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THAT(members_of(whole.substr(0, size), MembersKind::npz),
                ElementsAre(HasSubstr("is no .npz file")));
  }
  EXPECT_THAT(members_of(archive(files.substr(1)), MembersKind::npz),
              ElementsAre(HasSubstr("has a damaged ZIP directory")));
}

}  // namespace
}  // namespace nostall::records
