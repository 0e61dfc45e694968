// One walk a format. Values that are not numbers in lists are skipped by their lengths.
#include "records/members.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <utility>

#include "records/protobuf.h"
#include "records/records.h"

namespace nostall::records {
namespace {

constexpr size_t kMostName = 4096;
constexpr unsigned kMostNesting = 32;

// Those that are wanted: of these names, or all where there are none.
class Members {
 public:
  explicit Members(std::span<const std::string> names) : names_(names) {}

  bool wants(const std::string& name) const {
    return names_.empty() || std::find(names_.begin(), names_.end(), name) != names_.end();
  }
  // False if they become too many.
  bool add(Member member) {
    if (!wants(member.name)) return true;
    too_many_ = found_.size() == kMostParts;
    if (!too_many_) found_.push_back(std::move(member));
    return !too_many_;
  }
  bool too_many() const { return too_many_; }
  // Of a name that has a value which is not read.
  void pass_over(std::string name) {
    if (wants(name) && (!names_.empty() || unread_.empty())) unread_.insert(std::move(name));
  }
  // One of those that is missed: all are wanted, or no member has its name.
  const std::string* missed() const {
    const auto it = std::find_if(unread_.begin(), unread_.end(), [this](const auto& name) {
      return names_.empty() || std::none_of(found_.begin(), found_.end(),
                                            [&](const Member& m) { return m.name == name; });
    });
    return it == unread_.end() ? nullptr : &*it;
  }
  std::vector<Member> take() { return std::move(found_); }

 private:
  std::span<const std::string> names_;
  std::vector<Member> found_;
  std::set<std::string> unread_;
  bool too_many_ = false;
};

std::string place_of(const FileWindow& window, uint64_t offset) {
  return "the record at offset " + std::to_string(offset) + " of " + window.path();
}

Error wrong(const FileWindow& window, uint64_t offset, const char* what) {
  if (window.error()) return *window.error();
  return Error(ErrorKind::corruption, place_of(window, offset) + " " + what);
}

std::optional<std::string> text_at(FileWindow& window, uint64_t at, uint64_t length) {
  if (length == 0) return std::string();
  if (length > kMostName) return {};
  const auto bytes = window.get(at, static_cast<size_t>(length));
  if (bytes.empty()) return {};
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// How many varints the bytes are; nothing if they end within one.
std::optional<uint32_t> count_varints(FileWindow& window, uint64_t at, uint64_t length) {
  constexpr uint64_t kAtOnce = 16 << 10;
  uint64_t count = 0;
  bool ended = true;
  for (uint64_t done = 0; done < length;) {
    const auto bytes = window.get(at + done, std::min(kAtOnce, length - done));
    if (bytes.empty()) return {};
    for (const std::byte byte : bytes) {
      ended = (byte & std::byte{0x80}) == std::byte{0};
      count += ended ? 1 : 0;
    }
    done += bytes.size();
  }
  if (!ended || count > UINT32_MAX) return {};
  return static_cast<uint32_t>(count);
}

// ---- tf.train.Example: a map of features, each a list of byte strings, floats or integers.

bool take_list(FileWindow& window, const Message::Field& list, Member& member) {
  Message values(window, list.begin, list.begin + list.length);
  member.offset = list.begin;
  member.length = 0;
  member.list = list.number != 1;
  unsigned pieces = 0;
  while (const auto value = values.next()) {
    if (value->number != 1) continue;
    ++pieces;
    member.offset = value->begin;
    member.length = value->length;
    const bool packed = value->wire == 2;
    if (list.number == 1) {
      if (!packed) return false;
    } else if (list.number == 2) {
      if (!(packed || value->wire == 5) || value->length % sizeof(float) != 0) return false;
      if (value->length / sizeof(float) > UINT32_MAX) return false;
      member.count = static_cast<uint32_t>(value->length / sizeof(float));
    } else {
      const auto count = count_varints(window, value->begin, value->length);
      if (!(packed || value->wire == 0) || !count) return false;
      member.count = *count;
    }
  }
  static constexpr std::array kTypes{MemberType::bytes, MemberType::floats, MemberType::varints};
  member.type = kTypes[list.number - 1];
  if (pieces > 1) member.type = MemberType::unread;
  if (list.number == 1 && pieces == 0) member.type = MemberType::none;
  return values.ok();
}

// Of a map from names to messages.
struct Entry {
  std::string name;
  std::optional<Message::Field> value;
};
std::optional<Entry> entry_of(FileWindow& window, const Message::Field& field) {
  Message pair(window, field.begin, field.begin + field.length);
  Entry entry;
  while (const auto f = pair.next()) {
    if (f->number == 1 && f->wire == 2) {
      auto name = text_at(window, f->begin, f->length);
      if (!name) return {};
      entry.name = std::move(*name);
    }
    if (f->number == 2 && f->wire == 2) entry.value = f;
  }
  return pair.ok() ? std::optional(std::move(entry)) : std::nullopt;
}

bool take_feature(FileWindow& window, Entry feature, Members& members) {
  Member member;
  member.name = std::move(feature.name);
  if (feature.value) {
    Message lists(window, feature.value->begin, feature.value->begin + feature.value->length);
    while (const auto list = lists.next()) {
      if (list->wire != 2 || list->number > 3) continue;
      if (!take_list(window, *list, member)) return false;
    }
    if (!lists.ok()) return false;
  }
  return members.add(std::move(member));
}

// A tf.train.SequenceExample is one whose field 1 has another name, and a map of lists of features
// beside it, which are passed over.
bool of_example(FileWindow& window, uint64_t offset, uint64_t length, Members& members) {
  Message example(window, offset, offset + length);
  bool good = true;
  while (const auto f = good ? example.next() : std::nullopt) {
    if (f->number > 2 || f->wire != 2) continue;
    Message map(window, f->begin, f->begin + f->length);
    while (const auto m = good ? map.next() : std::nullopt) {
      if (m->number != 1 || m->wire != 2) continue;
      auto entry = entry_of(window, *m);
      if (!entry) {
        good = false;
      } else if (f->number == 1) {
        good = take_feature(window, std::move(*entry), members);
      } else {
        members.pass_over(std::move(entry->name));
      }
    }
    good = good && map.ok();
  }
  return good && example.ok() && !window.error();
}

// ---- .npz: a ZIP archive of stored .npy files, found by its central directory.

template <typename T>
T little(std::span<const std::byte> bytes, size_t at) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    value = static_cast<T>(value | static_cast<T>(uint8_t(bytes[at + i])) << (8 * i));
  }
  return value;
}

struct Directory {
  uint64_t begin = 0, size = 0;  // in the record
  unsigned entries = 0;
};

std::optional<Directory> find_directory(FileWindow& window, uint64_t offset, uint64_t length) {
  constexpr uint64_t kEnd = 22, kMostComment = 65535;
  const uint64_t tail = std::min(length, kEnd + kMostComment);
  const auto bytes = window.get(offset + length - tail, static_cast<size_t>(tail));
  if (bytes.size() < kEnd) return {};
  for (size_t at = bytes.size() - kEnd + 1; at-- > 0;) {
    if (little<uint32_t>(bytes, at) != 0x06054b50) continue;
    const Directory d{little<uint32_t>(bytes, at + 16), little<uint32_t>(bytes, at + 12),
                      little<uint16_t>(bytes, at + 10)};
    const bool last = at + kEnd + little<uint16_t>(bytes, at + 20) == bytes.size();
    if (last && d.begin + d.size == length - tail + at) return d;
  }
  return {};
}

// What is wrong with it; nothing also where members are too many.
const char* of_npz(FileWindow& window, uint64_t offset, uint64_t length, Members& members) {
  constexpr size_t kEntry = 46, kLocal = 30;
  const auto directory = length == 0 ? std::nullopt : find_directory(window, offset, length);
  if (!directory) return "is no .npz file";
  uint64_t at = offset + directory->begin;
  const uint64_t end = at + directory->size;
  for (unsigned i = 0; i < directory->entries; ++i) {
    constexpr const char* kDamaged = "has a damaged ZIP directory";
    if (end - at < kEntry) return kDamaged;
    const auto entry = window.get(at, kEntry);
    if (entry.empty() || little<uint32_t>(entry, 0) != 0x02014b50) return kDamaged;
    const bool stored = little<uint16_t>(entry, 10) == 0 && (little<uint16_t>(entry, 8) & 1) == 0;
    const uint64_t size = little<uint32_t>(entry, 20), name = little<uint16_t>(entry, 28);
    const uint64_t rest = name + little<uint16_t>(entry, 30) + little<uint16_t>(entry, 32);
    const uint64_t local = little<uint32_t>(entry, 42);
    if (rest > end - at - kEntry || local > directory->begin || directory->begin - local < kLocal) {
      return kDamaged;
    }
    auto text = text_at(window, at + kEntry, name);
    if (!text) return kDamaged;
    at += kEntry + rest;
    const auto head = window.get(offset + local, kLocal);
    if (head.empty() || little<uint32_t>(head, 0) != 0x04034b50) return kDamaged;
    const uint64_t skip = uint64_t{little<uint16_t>(head, 26)} + little<uint16_t>(head, 28);
    if (skip > directory->begin - local - kLocal) return kDamaged;
    const uint64_t begin = local + kLocal + skip;
    if (size > directory->begin - begin) return kDamaged;
    Member member;
    constexpr std::string_view kEnding = ".npy";
    if (text->ends_with(kEnding)) text->resize(text->size() - kEnding.size());
    member.name = std::move(*text);
    member.offset = offset + begin;
    member.length = size;
    member.type = stored ? MemberType::npy : MemberType::unread;
    if (!members.add(std::move(member))) break;
  }
  return nullptr;
}

// ---- MessagePack: a map, or a list, of values.

class Msgpack {
 public:
  Msgpack(FileWindow& window, uint64_t begin, uint64_t end)
      : window_(window), at_(begin), end_(end) {}

  bool walk(Members& members) {
    Token top;
    if (!next(top) || (top.type != Token::map && top.type != Token::list)) return false;
    return children(top, {}, 0, members) && at_ == end_;
  }

 private:
  struct Token {
    enum Type : uint8_t { nil, boolean, integer, real, text, bytes, list, map, other };
    Type type = nil;
    uint64_t begin = 0;   // of its first byte
    uint64_t length = 0;  // bytes behind the head, or elements
  };

  std::optional<uint64_t> big(size_t size) {
    if (size > end_ - at_) return {};
    const auto bytes = window_.get(at_, size);
    if (bytes.empty()) return {};
    at_ += size;
    uint64_t value = 0;
    for (const std::byte byte : bytes) value = value << 8 | uint8_t(byte);
    return value;
  }
  // The head of the next value; bytes behind it are not skipped.
  bool next(Token& token) {
    token = {};
    token.begin = at_;
    const auto first = big(1);
    if (!first) return false;
    const auto b = static_cast<uint8_t>(*first);
    const auto sized = [&](Token::Type type, size_t head, uint64_t more = 0) {
      const auto size = big(head);
      token.type = type;
      token.length = size.value_or(0) + more;
      return size.has_value();
    };
    const auto fixed = [&](Token::Type type, uint64_t length) {
      token.type = type;
      token.length = length;
      return true;
    };
    if (b < 0x80 || b >= 0xe0) return fixed(Token::integer, 0);
    if (b < 0x90) return fixed(Token::map, b & 15u);
    if (b < 0xa0) return fixed(Token::list, b & 15u);
    if (b < 0xc0) return fixed(Token::text, b & 31u);
    switch (b) {
      case 0xc0:
        return true;
      case 0xc2:
      case 0xc3:
        return fixed(Token::boolean, 0);
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return sized(Token::bytes, size_t{1} << (b - 0xc4));
      case 0xc7:
      case 0xc8:
      case 0xc9:
        return sized(Token::other, size_t{1} << (b - 0xc7), 1);
      case 0xca:
        return fixed(Token::real, 4);
      case 0xcb:
        return fixed(Token::real, 8);
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf:
        return fixed(Token::integer, uint64_t{1} << (b - 0xcc));
      case 0xd0:
      case 0xd1:
      case 0xd2:
      case 0xd3:
        return fixed(Token::integer, uint64_t{1} << (b - 0xd0));
      case 0xd4:
      case 0xd5:
      case 0xd6:
      case 0xd7:
      case 0xd8:
        return fixed(Token::other, 1 + (uint64_t{1} << (b - 0xd4)));
      case 0xd9:
      case 0xda:
      case 0xdb:
        return sized(Token::text, size_t{1} << (b - 0xd9));
      case 0xdc:
      case 0xdd:
        return sized(Token::list, size_t{2} << (b - 0xdc));
      case 0xde:
      case 0xdf:
        return sized(Token::map, size_t{2} << (b - 0xde));
      default:
        return false;
    }
  }
  bool skip_bytes(const Token& token) {
    if (token.length > end_ - at_) return false;
    at_ += token.length;
    return true;
  }

  bool children(const Token& of, const std::string& prefix, unsigned depth, Members& members) {
    if (depth > kMostNesting) return false;
    for (uint64_t i = 0; i < of.length; ++i) {
      std::string name = std::to_string(i);
      if (of.type == Token::map) {
        Token key;
        if (!next(key)) return false;
        const uint64_t begin = at_;
        if (key.type == Token::integer && key.length == 0 && key.begin + 1 == at_) {
          const auto byte = window_.get(key.begin, 1);
          if (byte.empty()) return false;
          name = std::to_string(static_cast<int8_t>(byte[0]));
        } else if ((key.type != Token::text && key.type != Token::bytes) || !skip_bytes(key)) {
          return false;
        } else {
          auto text = text_at(window_, begin, key.length);
          if (!text) return false;
          name = std::move(*text);
        }
      }
      // Of a deep map, a few bytes may name a long one.
      if (prefix.size() + name.size() > kMostName) return false;
      if (!value(prefix + name, depth, members)) return false;
    }
    return true;
  }
  bool value(std::string name, unsigned depth, Members& members) {
    Token token;
    if (!next(token)) return false;
    if (token.type == Token::map) return children(token, name + ".", depth + 1, members);
    Member member;
    member.name = std::move(name);
    member.offset = token.begin;
    if (token.type == Token::list) {
      member.list = true;
      member.count = static_cast<uint32_t>(token.length);
      member.type = token.length == 0 ? MemberType::integer : MemberType::none;
      if (!numbers(token, depth + 1, member.type)) return false;
    } else {
      member.type = type_of(token.type);
      member.count = 1;
      if (token.type == Token::text || token.type == Token::bytes) member.offset = at_;
      if (!skip_bytes(token)) return false;
    }
    member.length = at_ - member.offset;
    return members.add(std::move(member));
  }
  static MemberType type_of(Token::Type type) {
    static constexpr std::array kTypes{MemberType::none, MemberType::boolean, MemberType::integer,
                                       MemberType::real, MemberType::text,    MemberType::bytes};
    return type < kTypes.size() ? kTypes[type] : MemberType::unread;
  }
  // Passes over the values of a list, and says what they are together.
  bool numbers(const Token& list, unsigned depth, MemberType& type) {
    if (depth > kMostNesting) return false;
    for (uint64_t i = 0; i < list.length; ++i) {
      Token token;
      if (!next(token)) return false;
      if (token.type == Token::list || token.type == Token::map) {
        Token inner = token;
        if (token.type == Token::map) {
          type = MemberType::unread;
          inner.length *= 2;
        } else if (token.length == 0 && type == MemberType::none) {
          type = MemberType::integer;
        }
        if (!numbers(inner, depth + 1, type)) return false;
        continue;
      }
      if (!skip_bytes(token)) return false;
      const MemberType here = type_of(token.type);
      const bool number = token.type >= Token::boolean && token.type <= Token::real;
      if (!number || type == MemberType::unread) {
        type = MemberType::unread;
      } else if (type == MemberType::none || here == type) {
        type = here;
      } else {
        type = here == MemberType::boolean || type == MemberType::boolean ? MemberType::unread
                                                                          : MemberType::real;
      }
    }
    return true;
  }

  FileWindow& window_;
  uint64_t at_, end_;
};

}  // namespace

std::string_view name_of(MemberType type) noexcept {
  static constexpr std::array<std::string_view, 10> kNames{
      "bytes", "text", "npy", "floats", "varints", "boolean", "integer", "real", "none", "unread"};
  return kNames[static_cast<size_t>(type)];
}

Result<std::vector<Member>> find_members(FileWindow& window, uint64_t offset, uint64_t length,
                                         MembersKind kind, std::span<const std::string> names) {
  if (offset > window.file_size() || length > window.file_size() - offset) {
    return wrong(window, offset, "is not inside the file");
  }
  Members members(names);
  const char* why = nullptr;
  switch (kind) {
    case MembersKind::example:
      if (!of_example(window, offset, length, members)) why = "is no tf.train.Example";
      break;
    case MembersKind::npz:
      why = of_npz(window, offset, length, members);
      break;
    case MembersKind::msgpack:
      if (!Msgpack(window, offset, offset + length).walk(members)) {
        why = "is no MessagePack map or list that is read";
      }
      break;
  }
  if (members.too_many()) {
    return Error(ErrorKind::usage, place_of(window, offset) + " has more than " +
                                       std::to_string(kMostParts) + " values: name the fields");
  }
  if (why) return wrong(window, offset, why);
  if (const std::string* sequence = members.missed()) {
    return Error(ErrorKind::usage,
                 place_of(window, offset) +
                     " is a tf.train.SequenceExample, whose feature list \"" +
                     source::printable(*sequence) +
                     "\" is not read: name features of its context alone, or write "
                     "tf.train.Example");
  }
  return members.take();
}

}  // namespace nostall::records
