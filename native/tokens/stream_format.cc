// The stored form of an index (docs/formats/tokens.md, version 1): fixed numbers, little-endian.
#include <cstring>

#include "base/crc32c.h"
#include "base/sealed.h"
#include "source/index.h"
#include "tokens/stream.h"

namespace nostall::tokens {
namespace {

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

// All but the low halves of the numbers of documents, and the checksum.
Writer written_head(const Index& index) {
  Writer w;
  const Documents& documents = *index.documents;
  w.number(kTokensMagic);
  w.number(kTokensVersion);
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
  return w;
}

struct Head {
  Index index;
  uint64_t tokens = 0, documents = 0;
  std::vector<uint64_t> blocks;
};

// `p` then stands at the low halves.
Result<Head> parse_head(Parser& p) {
  Head head;
  if (p.number<uint32_t>() != kTokensMagic) return damaged("wrong magic");
  if (const auto version = p.number<uint32_t>(); version != kTokensVersion) {
    return Error(ErrorKind::corruption, "the stored index has version " + std::to_string(version) +
                                            ", this release reads " +
                                            std::to_string(kTokensVersion));
  }
  head.index.width = p.number<uint32_t>();
  const uint32_t width = head.index.width;
  if (width != 1 && width != 2 && width != 4 && width != 8) {
    return damaged("ids of " + std::to_string(width) + " bytes");
  }
  const auto files = p.number<uint32_t>();
  const auto extents = p.number<uint64_t>();
  head.tokens = p.number<uint64_t>();
  head.documents = p.number<uint64_t>();
  if (head.tokens > kMostTokens) return damaged("too many tokens");
  head.index.stamp = p.text();
  for (uint32_t i = 0; i < files && p.ok(); ++i) {
    records::StorageFile f;
    f.path = p.text();
    f.size = p.number<uint64_t>();
    f.mtime_ns = p.number<int64_t>();
    head.index.files.push_back(std::move(f));
  }
  for (uint64_t i = 0; i < extents && p.ok(); ++i) {
    Extent e;
    e.file = p.number<uint32_t>();
    e.offset = p.number<uint64_t>();
    e.tokens = p.number<uint64_t>();
    if (e.file >= files || e.tokens > head.tokens) return damaged("an extent is in no file");
    head.index.extents.push_back(e);
  }
  head.blocks = p.array<uint64_t>((head.tokens >> 32) + 2);
  return head;
}

Result<Index> with_documents(Head head, std::unique_ptr<Shareable> low) {
  try {
    head.index.documents =
        std::make_shared<const Documents>(std::move(low), std::move(head.blocks), head.tokens);
  } catch (const Error& error) {
    return damaged(error.what());
  }
  return std::move(head.index);
}

}  // namespace

std::vector<std::byte> serialize_index(const Index& index) {
  Writer w = written_head(index);
  w.array(index.documents->low());
  w.number(crc32c(w.out));
  return std::move(w.out);
}

std::pair<int, uint64_t> store_index(const std::string& path, const Index& index) {
  const Writer head = written_head(index);
  const auto low = std::as_bytes(index.documents->low());
  Writer sum;
  sum.number(crc32c(low, crc32c(head.out)));
  return {source::store_parts(path, {head.out, low, sum.out}),
          head.out.size() + low.size() + sum.out.size()};
}

Result<Index> parse_index(std::span<const std::byte> bytes) {
  if (bytes.size() < 12) return damaged("it is too short");
  const auto content = bytes.first(bytes.size() - 4);
  if (Parser(bytes).number<uint32_t>() != kTokensMagic) return damaged("wrong magic");
  if (Parser(bytes.last(4)).number<uint32_t>() != crc32c(content)) {
    return damaged("wrong checksum");
  }
  Parser p(content);
  auto head = parse_head(p);
  if (!head) return head.error();
  const auto stored = p.array_bytes<uint32_t>(head.value().documents);
  if (!p.ok() || p.left() != 0) return damaged("its length is wrong");
  std::unique_ptr<Shareable> low;
  if (!stored.empty()) {
    low = std::make_unique<Shareable>(stored.size());
    std::memcpy(low->data(), stored.data(), stored.size());
  }
  return with_documents(std::move(head).take(), std::move(low));
}

std::vector<Descriptor> share_index(const Index& index) {
  std::vector<Descriptor> files;
  const Writer w = written_head(index);
  SealedMemory head("nostall-index", w.out.size());
  std::memcpy(head.data(), w.out.data(), w.out.size());
  files.push_back(head.seal());
  if (Shareable* const low = index.documents->shareable()) files.push_back(low->share().take());
  return files;
}

Result<Index> shared_index(std::span<const Descriptor> files) {
  if (files.empty() || files.size() > 2) return damaged("it is not shared so");
  const SealedMemory first(files[0]);
  Parser p({first.data(), first.size()});
  auto head = parse_head(p);
  if (!head) return head.error();
  std::unique_ptr<Shareable> low;
  if (files.size() == 2) {
    const SealedMemory second(files[1]);
    low = std::make_unique<Shareable>(second.size());
    std::memcpy(low->data(), second.data(), second.size());
    low->adopt(files[1]);
  }
  if (!p.ok() || p.left() != 0 || head.value().documents != (low ? low->size() / 4 : 0)) {
    return damaged("its length is wrong");
  }
  return with_documents(std::move(head).take(), std::move(low));
}

}  // namespace nostall::tokens
