// The stored form of an index (docs/formats/tokens.md, version 1): fixed numbers, little-endian.
#include <cstring>

#include "base/crc32c.h"
#include "tokens/stream.h"

namespace nostall::tokens {
namespace {

constexpr uint32_t kVersion = 1;
constexpr uint32_t kMostText = 65536;

class Writer {
 public:
  template <typename T>
  void number(T value) {
    const auto* p = reinterpret_cast<const std::byte*>(&value);
    out.insert(out.end(), p, p + sizeof value);
  }
  void text(std::string_view s) {
    number(static_cast<uint32_t>(s.size()));
    const auto* p = reinterpret_cast<const std::byte*>(s.data());
    out.insert(out.end(), p, p + s.size());
  }
  template <typename T>
  void array(std::span<const T> values) {
    const auto bytes = std::as_bytes(values);
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  std::vector<std::byte> out;
};

// Reads forward; once anything does not fit, everything after it is refused.
class Parser {
 public:
  explicit Parser(std::span<const std::byte> in) : in_(in) {}
  template <typename T>
  T number() {
    T value{};
    if (in_.size() < sizeof value) return fail<T>();
    std::memcpy(&value, in_.data(), sizeof value);
    in_ = in_.subspan(sizeof value);
    return value;
  }
  std::string text() {
    const auto size = number<uint32_t>();
    if (size > kMostText || size > in_.size()) return fail<std::string>();
    std::string s(reinterpret_cast<const char*>(in_.data()), size);
    in_ = in_.subspan(size);
    return s;
  }
  template <typename T>
  std::vector<T> array(uint64_t count) {
    const auto taken = array_bytes<T>(count);
    std::vector<T> values(taken.size() / sizeof(T));
    if (!taken.empty()) std::memcpy(values.data(), taken.data(), taken.size());
    return values;
  }
  template <typename T>
  std::span<const std::byte> array_bytes(uint64_t count) {
    if (count > in_.size() / sizeof(T)) return fail<std::span<const std::byte>>();
    const auto taken = in_.first(count * sizeof(T));
    in_ = in_.subspan(taken.size());
    return taken;
  }
  uint64_t left() const noexcept { return in_.size(); }
  bool ok() const noexcept { return ok_; }

 private:
  template <typename T>
  T fail() {
    ok_ = false;
    in_ = {};
    return {};
  }
  std::span<const std::byte> in_;
  bool ok_ = true;
};

Error damaged(const std::string& what) {
  return Error(ErrorKind::corruption, "the stored index is damaged: " + what);
}

}  // namespace

std::vector<std::byte> serialize_index(const Index& index) {
  Writer w;
  const Documents& documents = *index.documents;
  w.out.reserve(documents.low().size_bytes() + 4096);
  w.number(kTokensMagic);
  w.number(kVersion);
  w.number(index.width);
  w.number(static_cast<uint32_t>(index.files.size()));
  w.number(static_cast<uint64_t>(index.extents.size()));
  w.number(documents.tokens());
  w.number(documents.size());
  w.text(index.stamp);
  for (const records::StorageFile& f : index.files) {
    w.text(f.path);
    w.number(f.size);
    w.number(f.mtime_ns);
  }
  for (const Extent& e : index.extents) {
    w.number(e.file);
    w.number(e.offset);
    w.number(e.tokens);
  }
  w.array(documents.blocks());
  w.array(documents.low());
  w.number(crc32c(w.out));
  return std::move(w.out);
}

Result<Index> parse_index(std::span<const std::byte> bytes) {
  if (bytes.size() < 12) return damaged("it is too short");
  const auto content = bytes.first(bytes.size() - 4);
  Parser p(content);
  if (p.number<uint32_t>() != kTokensMagic) return damaged("wrong magic");
  if (Parser(bytes.last(4)).number<uint32_t>() != crc32c(content)) {
    return damaged("wrong checksum");
  }
  if (const auto version = p.number<uint32_t>(); version != kVersion) {
    return Error(ErrorKind::corruption, "the stored index has version " + std::to_string(version) +
                                            ", this release reads " + std::to_string(kVersion));
  }
  Index index;
  index.width = p.number<uint32_t>();
  if (index.width != 1 && index.width != 2 && index.width != 4 && index.width != 8) {
    return damaged("ids of " + std::to_string(index.width) + " bytes");
  }
  const auto files = p.number<uint32_t>();
  const auto extents = p.number<uint64_t>(), tokens = p.number<uint64_t>(),
             documents = p.number<uint64_t>();
  if (tokens > kMostTokens) return damaged("too many tokens");
  index.stamp = p.text();
  for (uint32_t i = 0; i < files && p.ok(); ++i) {
    records::StorageFile f;
    f.path = p.text();
    f.size = p.number<uint64_t>();
    f.mtime_ns = p.number<int64_t>();
    index.files.push_back(std::move(f));
  }
  for (uint64_t i = 0; i < extents && p.ok(); ++i) {
    Extent e;
    e.file = p.number<uint32_t>();
    e.offset = p.number<uint64_t>();
    e.tokens = p.number<uint64_t>();
    if (e.file >= files || e.tokens > tokens) return damaged("an extent is in no file");
    index.extents.push_back(e);
  }
  auto blocks = p.array<uint64_t>((tokens >> 32) + 2);
  const auto stored = p.array_bytes<uint32_t>(documents);
  if (!p.ok() || p.left() != 0) return damaged("its length is wrong");
  std::unique_ptr<Shareable> low;
  if (!stored.empty()) {
    low = std::make_unique<Shareable>(stored.size());
    std::memcpy(low->data(), stored.data(), stored.size());
  }
  try {
    index.documents = std::make_shared<const Documents>(std::move(low), std::move(blocks), tokens);
  } catch (const Error& error) {
    return damaged(error.what());
  }
  return index;
}

}  // namespace nostall::tokens
