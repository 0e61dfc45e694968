// records/local.h - private to the room: files of this machine as a Storage.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "records/ranges.h"

namespace nostall::records {

class LocalFiles : public Storage {
 public:
  LocalFiles(const std::vector<std::string>& paths, Direct direct);

  std::span<const StorageFile> files() const override { return files_; }
  std::unique_ptr<RangeReader> make_reader(source::ReaderKind kind, unsigned depth) const override;
  uint64_t stamp() const override { return stamp_; }
  std::string changed(uint32_t file) const override;
  std::optional<Touched> touched(uint32_t file) const override;
  bool peek(uint32_t file, uint64_t offset, std::span<std::byte> into) const override {
    return FileSystem::real().pread(buffered(file), into, offset) ==
           static_cast<int64_t>(into.size());
  }
  bool is_local() const override { return true; }

  int buffered(uint32_t file) const noexcept { return opened_[file].buffered.get(); }
  // -1 where the file system has no direct I/O, or the caller asked for none.
  int direct(uint32_t file) const noexcept { return opened_[file].direct.get(); }
  // Offsets, lengths and addresses of direct reads are multiples of this.
  uint32_t alignment(uint32_t file) const noexcept { return opened_[file].alignment; }
  Direct policy() const noexcept { return policy_; }
  // Whether the kernel refused the ring of one of the readers (ring.h).
  std::atomic<bool>& ring_refused() const noexcept { return ring_refused_; }

 private:
  struct Opened {
    Descriptor buffered, direct;
    uint32_t alignment = 4096;
  };
  std::vector<StorageFile> files_;
  std::vector<Opened> opened_;
  Direct policy_;
  uint64_t stamp_ = 0;
  mutable std::atomic<bool> ring_refused_{false};
};

// A buffer aligned for direct I/O; grows to the most that was taken of it, and never shrinks.
class AlignedBuffer {
 public:
  std::span<std::byte> take(size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* p) const noexcept;
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t capacity_ = 0;
};

// A range as the device takes it: aligned outwards where the read is direct.
struct AlignedRange {
  uint64_t offset = 0;
  size_t length = 0;
  size_t skip = 0;  // bytes before the range's first one
};
AlignedRange align(uint64_t offset, uint64_t size, uint32_t alignment) noexcept;

// Direct reads that need a bounce buffer take ranges in parts that end at multiples of this in the
// file, so that a reader's memory does not grow with the samples.
inline constexpr uint64_t kDirectPart = uint64_t{1} << 20;
// `length` bytes of the range from its byte `begin` on, and the one of those parts that begins there.
RangeRead part_of(const RangeRead& range, uint64_t begin, uint64_t length);
RangeRead direct_part_of(const RangeRead& range, uint64_t begin);
// Into the range's memory, from the bytes that begin at its first one.
void scatter(const RangeRead& range, const std::byte* from) noexcept;

// One range by plain system calls; 0, an errno or kSizeChanged. `direct` needs a `bounce`.
int read_now(const LocalFiles& files, const RangeRead& range, bool direct, AlignedBuffer& bounce);

// Null, and the reason in `why`, where the kernel or the build has no io_uring.
std::unique_ptr<RangeReader> make_uring_ranges(const LocalFiles& files, unsigned depth,
                                               std::string& why);

}  // namespace nostall::records
