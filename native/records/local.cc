// Local files as a Storage: opening them (buffered, and O_DIRECT where wanted), the plain reader,
// and the adaptive reader. The latter reads plainly while reads come from the page cache, and goes
// over to io_uring with many reads in flight when two reads in a row were slow enough to come from
// a device.
#include "records/local.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <system_error>

#include "base/clock.h"
#include "base/cold_reads.h"

namespace nostall::records {
namespace {

constexpr uint32_t kDirectAlignment = 4096;
constexpr size_t kTimedTogether = size_t{32} << 10;  // bytes of reads from memory

uint64_t memory_bytes() {
  return static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

int64_t mtime_of(const struct stat& s) {
  return int64_t{s.st_mtim.tv_sec} * 1'000'000'000 + s.st_mtim.tv_nsec;
}

// A descriptor or -errno. Data sets of thousands of shards need more files than a process has by
// default: it is given as many as it may have.
int open_many(const std::string& path, int flags) {
  int fd = FileSystem::real().open(path, flags, 0);
  if (fd != -EMFILE) return fd;
  return raise_open_files() ? FileSystem::real().open(path, flags, 0) : fd;
}

// Plain calls, one range after the other.
class PlainRanges : public RangeReader {
 public:
  explicit PlainRanges(const LocalFiles& files) : files_(files) {}
  void read(std::span<RangeRead> ranges) override {
    for (RangeRead& r : ranges) {
      const bool direct = files_.policy() == Direct::always && files_.direct(r.file) >= 0;
      r.error = read_now(files_, r, direct, bounce_);
      bytes_ += direct ? align(r.offset, r.size(), files_.alignment(r.file)).length : r.size();
    }
  }
  std::string_view name() const override { return "pread"; }
  uint64_t bytes_read() const override { return bytes_; }

 private:
  const LocalFiles& files_;
  AlignedBuffer bounce_;
  uint64_t bytes_ = 0;
};

// Plain buffered reads while they come from memory, many in flight while they come from a device.
class AdaptiveRanges : public RangeReader {
 public:
  AdaptiveRanges(const LocalFiles& files, unsigned depth) : files_(files), plain_(files) {
    std::string why;
    uring_ = make_uring_ranges(files, depth, why);
  }
  void read(std::span<RangeRead> ranges) override {
    if (!uring_ || files_.policy() == Direct::always) {
      (uring_ ? *uring_ : static_cast<RangeReader&>(plain_)).read(ranges);
      return;
    }
    for (int64_t begin = now_ns(); !ranges.empty();) {
      if (cold_.many()) {
        uring_->read(ranges);
        return;
      }
      // Small reads that come from memory take little longer than to look at the clock.
      size_t count = 1, bytes = ranges[0].size();
      while (quick_ && count < ranges.size() && bytes + ranges[count].size() <= kTimedTogether) {
        bytes += ranges[count++].size();
      }
      plain_.read(ranges.first(count));
      const int64_t end = now_ns();
      quick_ = cold_.took(bytes, end - begin);
      ranges = ranges.subspan(count);
      begin = end;
    }
  }
  std::string_view name() const override { return cold_.cold() ? uring_->name() : plain_.name(); }
  uint64_t bytes_read() const override {
    return plain_.bytes_read() + (uring_ ? uring_->bytes_read() : 0);
  }

 private:
  const LocalFiles& files_;
  PlainRanges plain_;
  std::unique_ptr<RangeReader> uring_;
  ColdReads cold_;
  bool quick_ = false;  // whether the last read came from memory
};

}  // namespace

void AlignedBuffer::Free::operator()(std::byte* p) const noexcept { std::free(p); }

std::span<std::byte> AlignedBuffer::take(size_t bytes) {
  if (bytes > capacity_) {
    const size_t capacity = (bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
    memory_.reset();
    capacity_ = 0;
    auto* p = static_cast<std::byte*>(std::aligned_alloc(kDirectAlignment, capacity));
    if (!p) throw std::bad_alloc();
    memory_.reset(p);
    capacity_ = capacity;
  }
  return {memory_.get(), bytes};
}

AlignedRange align(uint64_t offset, uint64_t size, uint32_t alignment) noexcept {
  const uint64_t begin = offset / alignment * alignment;
  const uint64_t end = (offset + size + alignment - 1) / alignment * alignment;
  return {begin, static_cast<size_t>(end - begin), static_cast<size_t>(offset - begin)};
}

RangeRead part_of(const RangeRead& range, uint64_t begin, uint64_t length) {
  const uint64_t first = std::min<uint64_t>(begin, range.head.size());
  const uint64_t head = std::min<uint64_t>(length, range.head.size() - first);
  RangeRead part;
  part.file = range.file;
  part.offset = range.offset + begin;
  part.head = range.head.subspan(first, head);
  part.into = range.into.subspan(begin - first, length - head);
  part.once = range.once;
  return part;
}

RangeRead direct_part_of(const RangeRead& range, uint64_t begin) {
  const uint64_t to_end = kDirectPart - (range.offset + begin) % kDirectPart;
  return part_of(range, begin, std::min(to_end, range.size() - begin));
}

void scatter(const RangeRead& range, const std::byte* from) noexcept {
  if (!range.head.empty()) std::memcpy(range.head.data(), from, range.head.size());
  if (!range.into.empty()) {
    std::memcpy(range.into.data(), from + range.head.size(), range.into.size());
  }
}

namespace {

bool read_direct(const LocalFiles& files, const RangeRead& range, AlignedBuffer& bounce) {
  const AlignedRange a = align(range.offset, range.size(), files.alignment(range.file));
  const std::span<std::byte> all = bounce.take(a.length);
  ssize_t n = 0;
  do {
    n = ::pread(files.direct(range.file), all.data(), all.size(), static_cast<off_t>(a.offset));
  } while (n < 0 && errno == EINTR);
  if (n < 0 || static_cast<uint64_t>(n) < a.skip + range.size()) return false;
  scatter(range, all.data() + a.skip);
  return true;
}

int read_buffered(const LocalFiles& files, const RangeRead& range) {
  const auto take = [fd = files.buffered(range.file)](std::span<std::byte> into, uint64_t offset) {
    const int64_t n = FileSystem::real().pread(fd, into, offset);
    if (n < 0) return static_cast<int>(-n);
    return static_cast<size_t>(n) == into.size() ? 0 : source::kSizeChanged;
  };
  if (range.head.empty()) return take(range.into, range.offset);
  iovec parts[2] = {{range.head.data(), range.head.size()}, {range.into.data(), range.into.size()}};
  ssize_t n = 0;
  do {
    n = ::preadv(files.buffered(range.file), parts, 2, static_cast<off_t>(range.offset));
  } while (n < 0 && errno == EINTR);
  if (n < 0) return errno;
  if (static_cast<uint64_t>(n) == range.size()) return 0;
  // Rare: interrupted in the middle, or the end of the file.
  if (const int error = take(range.head, range.offset)) return error;
  return take(range.into, range.offset + range.head.size());
}

}  // namespace

int read_now(const LocalFiles& files, const RangeRead& range, bool direct, AlignedBuffer& bounce) {
  uint64_t done = 0;
  while (direct && done < range.size()) {
    const RangeRead part = direct_part_of(range, done);
    // What is left need not be aligned: the end of the file, or a file system that refuses this
    // read. A plain read decides which.
    if (!read_direct(files, part, bounce)) break;
    done += part.size();
  }
  if (done == range.size()) return 0;
  return done == 0 ? read_buffered(files, range)
                   : read_buffered(files, part_of(range, done, range.size() - done));
}

LocalFiles::LocalFiles(const std::vector<std::string>& paths, Direct direct) : policy_(direct) {
  for (const std::string& path : paths) {
    Opened o;
    const int fd = open_many(path, O_RDONLY | O_NONBLOCK);
    if (fd == -EMFILE) {
      opened_.clear();  // reporting the error may need a descriptor
      throw Error(ErrorKind::io,
                  "cannot open " + path + ", file " + std::to_string(files_.size() + 1) + " of " +
                      std::to_string(paths.size()) +
                      ": the process may not have as many files open; raise the limit (ulimit -n) "
                      "to more than twice their number",
                  EMFILE);
    }
    if (fd < 0) throw io_error("cannot open", path, -fd);
    o.buffered = Descriptor(fd);
    struct stat s {};
    if (::fstat(fd, &s) != 0) throw io_error("cannot examine", path, errno);
    if (!S_ISREG(s.st_mode)) {
      throw Error(ErrorKind::io, path + " is not a regular file: give the path of the file itself");
    }
    // The flag was for pipes, which block in open. With it, io_uring lets a read fail instead of
    // wait on file systems (mostly of networks) that do not know beforehand whether it would.
    if (::fcntl(fd, F_SETFL, O_RDONLY) != 0) throw io_error("cannot prepare", path, errno);
    // Ranges are asked for in full and ahead of need: the kernel's guesses only add bytes.
    static_cast<void>(::posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM));
    if (direct != Direct::never) {
      o.direct = Descriptor(std::max(-1, open_many(path, O_RDONLY | O_DIRECT)));
      AlignedBuffer probe;
      // Some file systems take the flag and refuse the read.
      if (o.direct && s.st_size > 0 &&
          ::pread(o.direct.get(), probe.take(o.alignment).data(), o.alignment, 0) < 0) {
        o.direct.reset();
      }
    }
    files_.push_back({path, static_cast<uint64_t>(s.st_size), mtime_of(s)});
    opened_.push_back(std::move(o));
  }
  uint64_t total = 0;
  Fnv hash;
  for (const StorageFile& f : files_) {
    total += f.size;
    // Processes may name a file by other paths, and other files by one.
    std::error_code unknown;
    const std::string where = std::filesystem::canonical(f.path, unknown).string();
    hash.text(unknown ? f.path : where).number(static_cast<uint64_t>(f.mtime_ns));
  }
  stamp_ = hash.value();
  if (policy_ == Direct::automatic && total > memory_bytes()) policy_ = Direct::always;
}

std::string LocalFiles::changed(uint32_t file) const {
  struct stat s {};
  if (::fstat(buffered(file), &s) != 0) return "it cannot be examined any more";
  if (static_cast<uint64_t>(s.st_size) != files_[file].size) {
    return "its size changed from " + std::to_string(files_[file].size) + " to " +
           std::to_string(s.st_size) + " bytes";
  }
  if (mtime_of(s) != files_[file].mtime_ns) return "it was written to since it was opened";
  return {};
}

std::optional<Storage::Touched> LocalFiles::touched(uint32_t file) const {
  struct stat s {};
  if (::fstat(buffered(file), &s) != 0) return {};
  const auto size = static_cast<uint64_t>(s.st_size);
  if (size < files_[file].size) return {};
  return Touched{mtime_of(s), size};
}

std::unique_ptr<RangeReader> LocalFiles::make_reader(source::ReaderKind kind,
                                                     unsigned depth) const {
  if (kind == source::ReaderKind::pread) return std::make_unique<PlainRanges>(*this);
  if (kind == source::ReaderKind::automatic) return std::make_unique<AdaptiveRanges>(*this, depth);
  std::string why;
  auto reader = make_uring_ranges(*this, depth, why);
  if (!reader) {
    throw Error(ErrorKind::usage, "io_uring cannot be used here: " + why +
                                      "; pass reader=\"pread\" or reader=\"auto\"");
  }
  return reader;
}

std::unique_ptr<Storage> open_files(const std::vector<std::string>& paths, Direct direct) {
  return std::make_unique<LocalFiles>(paths, direct);
}

void read_range(RangeReader& reader, const Storage& storage, uint32_t file, uint64_t offset,
                std::span<std::byte> into) {
  RangeRead range;
  range.file = file;
  range.offset = offset;
  range.into = into;
  reader.read({&range, 1});
  if (range.error != 0) {
    throw Error(ErrorKind::io,
                "cannot read " + std::to_string(into.size()) + " bytes of " +
                    storage.files()[file].path + " at offset " + std::to_string(offset) + ": " +
                    (range.why.empty() ? source::read_error_text(range.error) : range.why),
                range.error);
  }
}

}  // namespace nostall::records
