// The sample index and its stored form (docs/formats/index.md): a writer of little-endian numbers,
// and a parser that checks every count against the bytes that are left before it takes memory.
#include "source/index.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <random>

#include "base/crc32c.h"
#include "base/fnv.h"

namespace nostall::source {
namespace {

constexpr uint32_t kMagic = kIndexMagic;
constexpr uint32_t kVersion = 1;
// Longer paths than the kernel takes, and more classes than labels can be, are damage.
constexpr uint64_t kMaxPath = 4096;

class Writer {
 public:
  template <typename T>
  void number(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) {
      out.push_back(static_cast<std::byte>((static_cast<uint64_t>(value) >> (8 * i)) & 0xff));
    }
  }
  void text(std::string_view s) {
    number(static_cast<uint32_t>(s.size()));
    for (const char c : s) out.push_back(static_cast<std::byte>(c));
  }
  std::vector<std::byte> out;
};

// Reads forward; once anything does not fit, everything after it is refused.
class Parser {
 public:
  explicit Parser(std::span<const std::byte> in) : in_(in) {}
  template <typename T>
  T number() {
    uint64_t value = 0;
    if (in_.size() < sizeof(T)) {
      ok_ = false;
      in_ = {};
      return T{};
    }
    for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t{uint8_t(in_[i])} << (8 * i);
    in_ = in_.subspan(sizeof(T));
    return static_cast<T>(value);
  }
  std::string_view text() {
    const auto size = number<uint32_t>();
    if (size > kMaxPath || size > in_.size()) {
      ok_ = false;
      in_ = {};
      return {};
    }
    const std::string_view s(reinterpret_cast<const char*>(in_.data()), size);
    in_ = in_.subspan(size);
    return s;
  }
  // A count of things of at least `least` bytes each: more than fit is refused before any is read.
  uint64_t count(uint64_t least) {
    const auto n = number<uint64_t>();
    if (n > in_.size() / least) ok_ = false;
    return ok_ ? n : 0;
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

}  // namespace

void SampleIndex::add(std::string_view path, uint64_t size, int64_t label) {
  names_ += path;
  ends_.push_back(names_.size());
  sizes_.push_back(size);
  labels_.push_back(label);
  total_bytes_ += size;
}

uint64_t SampleIndex::fingerprint() const noexcept {
  Fnv hash;
  hash.number(size());
  for (uint64_t i = 0; i < size(); ++i) {
    hash.text(path(i)).number(sizes_[i]).number(static_cast<uint64_t>(labels_[i]));
  }
  for (const std::string& c : classes_) hash.text(c);
  return hash.value();
}

std::vector<std::byte> serialize_index(const SampleIndex& index, uint64_t options) {
  Writer w;
  w.number(kMagic);
  w.number(kVersion);
  w.number(options);
  w.number(static_cast<uint64_t>(index.directories().size()));
  for (const ListedDirectory& d : index.directories()) {
    w.text(d.path);
    w.number(d.mtime_ns);
  }
  w.number(static_cast<uint64_t>(index.classes().size()));
  for (const std::string& c : index.classes()) w.text(c);
  w.number(index.size());
  for (uint64_t i = 0; i < index.size(); ++i) {
    w.text(index.path(i));
    w.number(index.sizes()[i]);
    w.number(index.labels()[i]);
  }
  w.number(crc32c(w.out));
  return std::move(w.out);
}

Result<SampleIndex> parse_index(std::span<const std::byte> bytes, uint64_t options) {
  if (bytes.size() < 4) return damaged("it is too short");
  const auto content = bytes.first(bytes.size() - 4);
  if (Parser(bytes.last(4)).number<uint32_t>() != crc32c(content)) return damaged("wrong checksum");
  Parser p(content);
  if (p.number<uint32_t>() != kMagic) return damaged("wrong magic");
  if (p.number<uint32_t>() != kVersion) return damaged("unknown version");
  if (p.number<uint64_t>() != options) {
    return Error(ErrorKind::corruption, "the stored index was made with other options");
  }
  SampleIndex index;
  std::vector<ListedDirectory> directories;
  for (uint64_t n = p.count(12); n > 0 && p.ok(); --n) {
    ListedDirectory d;
    d.path = p.text();
    d.mtime_ns = p.number<int64_t>();
    directories.push_back(std::move(d));
  }
  std::vector<std::string> classes;
  for (uint64_t n = p.count(4); n > 0 && p.ok(); --n) classes.emplace_back(p.text());
  uint64_t total = 0;
  for (uint64_t n = p.count(20); n > 0 && p.ok(); --n) {
    const std::string_view path = p.text();
    const auto size = p.number<uint64_t>();
    const auto label = p.number<int64_t>();
    if (!p.ok()) break;
    if (path.empty() || path.find('\0') != std::string_view::npos) return damaged("a bad path");
    // No file is longer than off_t can say; and sums with record headers must not wrap around.
    if (__builtin_add_overflow(total, size, &total) ||
        total > static_cast<uint64_t>(std::numeric_limits<int64_t>::max() / 2)) {
      return damaged("impossible sizes");
    }
    if (!classes.empty() && (label < 0 || static_cast<uint64_t>(label) >= classes.size())) {
      return damaged("a label outside the classes");
    }
    index.add(path, size, label);
  }
  if (!p.ok() || !p.at_end()) return damaged("its length is wrong");
  index.set_classes(std::move(classes));
  index.set_directories(std::move(directories));
  return index;
}

int store_index(const std::string& path, std::span<const std::byte> bytes, FileSystem& files,
                Flush flush) {
  return store_parts(path, {bytes}, files, flush);
}

int store_parts(const std::string& path, std::initializer_list<std::span<const std::byte>> parts,
                FileSystem& files, Flush flush) {
  // Processes of other nodes and containers, which share the folder, have the same numbers.
  const std::string temporary = path + "." + std::to_string(::getpid()) + "-" +
                                std::to_string(std::random_device{}()) + ".tmp";
  const int fd = files.open(temporary, O_WRONLY | O_CREAT | O_EXCL, 0644);
  if (fd < 0) return fd;
  int error = 0;
  {
    const Descriptor file(fd);
    uint64_t at = 0;
    for (const std::span<const std::byte> bytes : parts) {
      const int64_t written = files.pwrite(fd, bytes, at);
      error = static_cast<int>(std::min<int64_t>(written, 0));
      if (error != 0) break;
      at += bytes.size();
    }
    if (error == 0 && flush == Flush::yes) error = files.fsync(fd);
  }
  if (error == 0) error = files.rename(temporary, path);
  if (error != 0) files.unlink(temporary);
  return error;
}

Result<StoredFile> open_stored(const std::string& path, uint32_t magic, uint64_t most,
                               FileSystem& files) {
  // Not to wait for a writer if it is a pipe.
  const int fd = files.open(path, O_RDONLY | O_NONBLOCK);
  if (fd < 0) return io_error("cannot open", path, -fd);
  Descriptor file(fd);
  struct stat status {};
  if (::fstat(fd, &status) != 0) return io_error("cannot examine", path, errno);
  if (!S_ISREG(status.st_mode)) {
    return Error(ErrorKind::corruption, path + " is not a regular file");
  }
  std::array<std::byte, 4> head{};
  const int64_t first = files.pread(fd, head, 0);
  if (first < 0) return io_error("cannot read", path, static_cast<int>(-first));
  if (first != 4 || Parser(head).number<uint32_t>() != magic) {
    return damaged("wrong magic");
  }
  const auto size = static_cast<uint64_t>(status.st_size);
  const uint64_t memory = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                          static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  if (size > std::min(most, memory / 4)) {
    return Error(ErrorKind::corruption,
                 path + " has " + std::to_string(size) + " bytes, more than it can need");
  }
  return StoredFile{std::move(file), size};
}

Result<std::vector<std::byte>> load_bytes(const std::string& path, uint32_t magic, uint64_t most,
                                          FileSystem& files) {
  auto stored = open_stored(path, magic, most, files);
  if (!stored) return stored.error();
  std::vector<std::byte> bytes(static_cast<size_t>(stored.value().size));
  const int64_t n = files.pread(stored.value().file.get(), bytes, 0);
  if (n < 0) return io_error("cannot read", path, static_cast<int>(-n));
  bytes.resize(static_cast<size_t>(n));
  return bytes;
}

}  // namespace nostall::source
