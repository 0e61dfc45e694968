// The stored form of a record table (docs/formats/records.md, version 2): columns as differences,
// in variable-length numbers, so that a record takes 4 to 11 bytes, and 2 to 4 more a part.
#include <algorithm>
#include <limits>

#include "base/crc32c.h"
#include "records/records.h"

namespace nostall::records {
namespace {

constexpr uint32_t kMagic = kRecordsMagic;
constexpr uint32_t kVersion = 2;
constexpr uint64_t kMaxText = 65536;
constexpr uint64_t kMaxPlace = uint64_t{1} << 62;  // no file is longer

uint64_t zigzag(int64_t v) {
  return (static_cast<uint64_t>(v) << 1) ^ static_cast<uint64_t>(v >> 63);
}
int64_t unzigzag(uint64_t v) { return static_cast<int64_t>(v >> 1) ^ -static_cast<int64_t>(v & 1); }

class Writer {
 public:
  void varint(uint64_t v) {
    for (; v >= 0x80; v >>= 7) out.push_back(static_cast<std::byte>(v | 0x80));
    out.push_back(static_cast<std::byte>(v));
  }
  void fixed(uint32_t v) {
    for (int i = 0; i < 4; ++i) out.push_back(static_cast<std::byte>(v >> (8 * i)));
  }
  void text(std::string_view s) {
    varint(s.size());
    for (const char c : s) out.push_back(static_cast<std::byte>(c));
  }
  std::vector<std::byte> out;
};

// Reads forward; once anything does not fit, everything after it is refused.
class Parser {
 public:
  explicit Parser(std::span<const std::byte> in) : in_(in) {}
  uint64_t varint() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && !in_.empty(); shift += 7) {
      const auto b = static_cast<uint64_t>(in_[0]);
      in_ = in_.subspan(1);
      if (shift == 63 && b > 1) break;
      // One number has one form: what is written back is what was read.
      if (b == 0 && shift > 0) break;
      value |= (b & 0x7f) << shift;
      if (b < 0x80) return value;
    }
    return fail();
  }
  uint32_t fixed() {
    if (in_.size() < 4) return static_cast<uint32_t>(fail());
    uint32_t value = 0;
    for (unsigned i = 0; i < 4; ++i) value |= uint32_t{uint8_t(in_[i])} << (8 * i);
    in_ = in_.subspan(4);
    return value;
  }
  std::string text() {
    const uint64_t size = varint();
    if (size > kMaxText || size > in_.size()) {
      fail();
      return {};
    }
    std::string s(reinterpret_cast<const char*>(in_.data()), size);
    in_ = in_.subspan(size);
    return s;
  }
  uint64_t count(uint64_t least) {
    const uint64_t n = varint();
    return n > in_.size() / least ? fail() : n;
  }
  uint64_t fail() {
    ok_ = false;
    in_ = {};
    return 0;
  }
  bool ok() const { return ok_; }
  bool at_end() const { return in_.empty(); }

 private:
  std::span<const std::byte> in_;
  bool ok_ = true;
};

Error damaged(const char* what) {
  return Error(ErrorKind::corruption, std::string("the stored index is damaged: ") + what);
}

enum Heads : uint64_t { kNoHeads = 0, kSameHeads = 1, kOwnHeads = 2 };

// The parts of a sample, as differences to the end of the part before and to the length that the
// same field had last. 0 stands for a part that is not there.
class Parts {
 public:
  explicit Parts(uint32_t parts) : lengths_(parts) {}

  void write(Writer& w, std::span<const uint32_t> offset, std::span<const uint32_t> length) {
    int64_t end = 0;
    for (size_t f = 0; f < lengths_.size(); ++f) {
      if (offset[f] == kNoPart) {
        w.varint(0);
        continue;
      }
      w.varint(zigzag(int64_t{offset[f]} - end) + 1);
      w.varint(zigzag(int64_t{length[f]} - static_cast<int64_t>(lengths_[f])));
      lengths_[f] = length[f];
      end = int64_t{offset[f]} + length[f];
    }
  }
  // False if a part is outside of a record of `size` bytes.
  bool read(Parser& p, uint64_t size, RecordTable& out) {
    uint64_t end = 0;
    for (uint64_t& last : lengths_) {
      const uint64_t begin = p.varint();
      if (begin == 0) {
        out.part_offset.push_back(kNoPart);
        out.part_length.push_back(0);
        continue;
      }
      const uint64_t offset = end + static_cast<uint64_t>(unzigzag(begin - 1));
      const uint64_t length = last + static_cast<uint64_t>(unzigzag(p.varint()));
      if (offset >= kNoPart || length > kNoPart || offset + length > size) return false;
      out.part_offset.push_back(static_cast<uint32_t>(offset));
      out.part_length.push_back(static_cast<uint32_t>(length));
      last = length;
      end = offset + length;
    }
    return true;
  }

 private:
  std::vector<uint64_t> lengths_;
};

}  // namespace

std::vector<std::byte> serialize_records(const RecordTable& table) {
  Writer w;
  w.fixed(kMagic);
  w.fixed(kVersion);
  w.text(table.kind);
  w.text(table.stamp);
  w.varint(table.files.size());
  for (const StorageFile& f : table.files) {
    w.text(f.path);
    w.varint(f.size);
    w.varint(zigzag(f.mtime_ns));
  }
  w.varint(table.parts);
  w.varint(table.size());
  w.varint(table.file.empty() ? 0 : 1);
  const bool same = std::adjacent_find(table.head.begin(), table.head.end(),
                                       std::not_equal_to<>()) == table.head.end();
  const Heads heads = table.head.empty() ? kNoHeads : same ? kSameHeads : kOwnHeads;
  w.varint(heads);
  if (heads == kSameHeads) w.varint(table.head.front());
  Parts parts(table.parts);
  uint64_t file = 0, end = 0, length = 0;
  for (uint64_t i = 0; i < table.size(); ++i) {
    if (!table.file.empty()) {
      w.varint(zigzag(static_cast<int64_t>(table.file[i]) - static_cast<int64_t>(file)));
      if (table.file[i] != file) end = 0;
      file = table.file[i];
    }
    if (heads == kOwnHeads) w.varint(table.head[i]);
    w.varint(zigzag(static_cast<int64_t>(table.offset[i] - end)));
    w.varint(zigzag(static_cast<int64_t>(table.length[i] - length)));
    w.varint(zigzag(table.label[i]));
    const size_t first = i * table.parts;
    parts.write(w, std::span(table.part_offset).subspan(first, table.parts),
                std::span(table.part_length).subspan(first, table.parts));
    length = table.length[i];
    end = table.offset[i] + length;
  }
  w.fixed(crc32c(w.out));
  return std::move(w.out);
}

Result<RecordTable> parse_records(std::span<const std::byte> bytes) {
  if (bytes.size() < 12) return damaged("it is too short");
  const auto content = bytes.first(bytes.size() - 4);
  if (Parser(bytes.last(4)).fixed() != crc32c(content)) return damaged("wrong checksum");
  Parser p(content);
  if (p.fixed() != kMagic) return damaged("wrong magic");
  if (const uint32_t version = p.fixed(); version != kVersion) {
    return Error(ErrorKind::corruption, "the stored index has version " + std::to_string(version) +
                                            ", this release reads " + std::to_string(kVersion));
  }
  RecordTable t;
  t.kind = p.text();
  t.stamp = p.text();
  const uint64_t files = p.count(3);
  for (uint64_t i = 0; i < files && p.ok(); ++i) {
    StorageFile f;
    f.path = p.text();
    f.size = p.varint();
    f.mtime_ns = unzigzag(p.varint());
    if (f.size > kMaxPlace) return damaged("a file is too long");
    t.files.push_back(std::move(f));
  }
  const uint64_t fields = p.varint();
  if (fields > kMostParts) return damaged("too many fields");
  t.parts = static_cast<uint32_t>(fields);
  const uint64_t n = p.count(3 + fields);
  const uint64_t many = p.varint(), heads = p.varint();
  if (many > 1 || heads > kOwnHeads) return damaged("unknown columns");
  const uint64_t head = heads == kSameHeads ? p.varint() : 0;
  if (!p.ok()) return damaged("it is cut off");
  if (head > std::numeric_limits<uint16_t>::max() || (n == 0 && (many != 0 || heads != 0))) {
    return damaged("a head is too long");
  }
  t.offset.reserve(n);
  t.length.reserve(n);
  t.label.reserve(n);
  if (heads == kSameHeads) t.head.assign(n, static_cast<uint16_t>(head));
  t.part_offset.reserve(n * fields);
  t.part_length.reserve(n * fields);
  Parts parts(t.parts);
  uint64_t file = 0, end = 0, length = 0;
  for (uint64_t i = 0; i < n; ++i) {
    if (many) {
      const uint64_t next = file + static_cast<uint64_t>(unzigzag(p.varint()));
      if (next >= t.files.size()) return damaged("a sample is in no file");
      if (next != file) end = 0;
      file = next;
      t.file.push_back(static_cast<uint32_t>(file));
    }
    if (heads == kOwnHeads) {
      const uint64_t own = p.varint();
      if (own > std::numeric_limits<uint16_t>::max()) return damaged("a head is too long");
      t.head.push_back(static_cast<uint16_t>(own));
    }
    const uint64_t offset = end + static_cast<uint64_t>(unzigzag(p.varint()));
    length += static_cast<uint64_t>(unzigzag(p.varint()));
    const int64_t label = unzigzag(p.varint());
    if (!p.ok()) return damaged("it is cut off");
    if (offset > kMaxPlace || length > kMaxPlace) return damaged("a sample cannot lie there");
    t.offset.push_back(offset);
    t.length.push_back(length);
    t.label.push_back(label);
    if (!parts.read(p, length, t)) return damaged("a field cannot lie there");
    end = offset + length;
  }
  if (!p.ok() || !p.at_end()) return damaged("it is too long");
  if (heads == kOwnHeads &&
      std::adjacent_find(t.head.begin(), t.head.end(), std::not_equal_to<>()) == t.head.end()) {
    return damaged("unknown columns");  // would not be written so
  }
  return t;
}

}  // namespace nostall::records
