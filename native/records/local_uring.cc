// Many ranges at once from one thread. Direct reads go through bounce buffers of their own, which
// the kernel keeps pinned (registered) where it allows that; buffered ones straight to their place.
#include <algorithm>
#include <cstring>

#include "records/local.h"

#if defined(NOSTALL_HAVE_URING)
#include <sys/uio.h>

#include <system_error>

#include "base/ring.h"
#endif

namespace nostall::records {

#if defined(NOSTALL_HAVE_URING)
namespace {

// Ranges up to this size use registered buffers; with 16 in flight they pin 4 MiB a thread, and
// never more than 16 MiB.
constexpr size_t kRegistered = 256 << 10;
constexpr size_t kMostPinned = 64;
// Of one direct read; the kernel's own limit lies a little below 2 GiB.
constexpr size_t kMostAtOnce = size_t{1} << 30;
constexpr unsigned kMostInFlight = 4096;  // a ring has 32768 entries at most

class UringRanges : public RangeReader {
 public:
  UringRanges(const LocalFiles& files, unsigned depth)
      : files_(files), slots_(depth), ring_(files.ring_refused()) {
    free_.reserve(depth);
  }

  // 0 or -errno.
  int start() {
    const auto depth = static_cast<unsigned>(slots_.size());
    // Completions are looked for when this thread waits anyway: no interrupt of its work.
    const int error = ring_.start(2 * depth, IORING_SETUP_COOP_TASKRUN);
    return error < 0 ? ring_.start(2 * depth, 0) : error;
  }

  void read(std::span<RangeRead> ranges) override {
    free_.clear();
    for (unsigned i = 0; i < slots_.size(); ++i) free_.push_back(i);
    try {
      for (size_t next = 0; next < ranges.size() || flying() > 0;) {
        while (next < ranges.size() && !free_.empty()) {
          RangeRead& range = ranges[next++];
          range.error = 0;
          if (range.size() == 0) continue;
          if (!ring_.usable()) {
            bytes_ += range.size();
            range.error = read_now(files_, range, false, fallback_);
            continue;
          }
          submit(range, free_.back());
          free_.pop_back();
        }
        // To wait for a few at once costs no depth that matters, and saves a switch for each.
        if (flying() > 0) collect(static_cast<unsigned>(std::max<size_t>(1, flying() / 4)));
      }
    } catch (...) {
      ring_.drain();
      throw;
    }
  }
  std::string_view name() const override { return ring_.usable() ? "io_uring" : "pread"; }
  uint64_t bytes_read() const override { return bytes_; }

 private:
  struct Slot {
    RangeRead* range = nullptr;
    bool direct = false;
    bool in_place = false;  // direct, and aligned for the device already
    AlignedRange aligned;
    AlignedBuffer bounce, large;
    std::span<std::byte> landed;
    iovec parts[2]{};
  };

  size_t flying() const noexcept { return slots_.size() - free_.size(); }

  void collect(unsigned wait) noexcept {
    ring_.collect(wait, [this](uint64_t slot, int result) {
      finish(slots_[slot], result);
      free_.push_back(static_cast<unsigned>(slot));
    });
  }

  // Pins bounce buffers for the first slots, at the first direct read; -errno where that is
  // refused.
  int pin() {
    std::vector<iovec> buffers;
    for (Slot& s : std::span(slots_).first(std::min(slots_.size(), kMostPinned))) {
      buffers.push_back({s.bounce.take(kRegistered).data(), kRegistered});
    }
    return io_uring_register_buffers(ring_.get(), buffers.data(),
                                     static_cast<unsigned>(buffers.size()));
  }

  void submit(RangeRead& range, unsigned index) {
    Slot& s = slots_[index];
    s.range = &range;
    s.direct = files_.direct(range.file) >= 0 && (files_.policy() == Direct::always || range.once);
    if (s.direct) {
      if (!tried_to_pin_) {
        tried_to_pin_ = true;
        pinned_ = pin() >= 0;
      }
      s.aligned = align(range.offset, range.size(), files_.alignment(range.file));
      bytes_ += s.aligned.length;
      // A longer one is finished by a plain call.
      const auto length = static_cast<unsigned>(std::min<size_t>(s.aligned.length, kMostAtOnce));
      const int fd = files_.direct(range.file);
      s.in_place =
          range.head.empty() && s.aligned.skip == 0 && s.aligned.length == range.size() &&
          reinterpret_cast<uintptr_t>(range.into.data()) % files_.alignment(range.file) == 0;
      const bool registered = pinned_ && index < kMostPinned && length <= kRegistered;
      if (!s.in_place) s.landed = (registered ? s.bounce : s.large).take(length);
      io_uring_sqe* sqe = ring_.next();
      if (s.in_place) {
        io_uring_prep_read(sqe, fd, range.into.data(), length, range.offset);
      } else if (registered) {
        io_uring_prep_read_fixed(sqe, fd, s.landed.data(), length, s.aligned.offset,
                                 static_cast<int>(index));
      } else {
        io_uring_prep_read(sqe, fd, s.landed.data(), length, s.aligned.offset);
      }
      ring_.add(sqe, index);
    } else {
      bytes_ += range.size();
      s.parts[0] = {range.head.data(), range.head.size()};
      s.parts[1] = {range.into.data(), range.into.size()};
      const bool whole = range.head.empty();
      io_uring_sqe* sqe = ring_.next();
      io_uring_prep_readv(sqe, files_.buffered(range.file), whole ? s.parts + 1 : s.parts,
                          whole ? 1 : 2, range.offset);
      ring_.add(sqe, index);
    }
  }

  void finish(Slot& s, int result) noexcept {
    RangeRead& range = *s.range;
    const uint64_t needed = s.direct ? s.aligned.skip + range.size() : range.size();
    if (result >= 0 && static_cast<uint64_t>(result) >= needed) {
      if (s.direct && !s.in_place) {
        const std::byte* from = s.landed.data() + s.aligned.skip;
        if (!range.head.empty()) std::memcpy(range.head.data(), from, range.head.size());
        if (!range.into.empty()) {
          std::memcpy(range.into.data(), from + range.head.size(), range.into.size());
        }
      }
      range.error = 0;
    } else if (result > 0 || result == -EINTR || result == -EAGAIN || result == -EINVAL ||
               result == -EOPNOTSUPP || result == -ENOMEM || result == -ECANCELED) {
      // Rare: cut short, given up, or not to the file system's taste. A plain call finishes it.
      range.error = read_now(files_, range, false, fallback_);
    } else {
      range.error = result == 0 ? source::kSizeChanged : -result;
    }
  }

  const LocalFiles& files_;
  std::vector<Slot> slots_;
  std::vector<unsigned> free_;  // slots with nothing in flight
  AlignedBuffer fallback_;
  bool tried_to_pin_ = false, pinned_ = false;
  uint64_t bytes_ = 0;
  Ring ring_;
};

}  // namespace

std::unique_ptr<RangeReader> make_uring_ranges(const LocalFiles& files, unsigned depth,
                                               std::string& why) {
  auto reader = std::make_unique<UringRanges>(files, std::clamp(depth, 1u, kMostInFlight));
  if (const int error = reader->start(); error < 0) {
    why = why_no_ring(error);
    return nullptr;
  }
  return reader;
}
#else
std::unique_ptr<RangeReader> make_uring_ranges(const LocalFiles&, unsigned, std::string& why) {
  why = "this build has no liburing";
  return nullptr;
}
#endif

}  // namespace nostall::records
