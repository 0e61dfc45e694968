// Many ranges at once from one thread. Direct reads go through bounce buffers of their own, in parts
// where ranges are large; the kernel keeps small ones pinned (registered) where it allows that. Buffered
// reads, and what suits the device as it is, go straight to their place.
#include <algorithm>

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
// Of one read; the kernel's own limit lies a little below 2 GiB. A multiple of every alignment.
constexpr uint64_t kMostAtOnce = uint64_t{1} << 30;
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
      uint64_t begun = 0;  // of the next range
      for (size_t next = 0; next < ranges.size() || flying() > 0;) {
        while (next < ranges.size() && !free_.empty()) {
          RangeRead& range = ranges[next];
          if (begun == 0) range.error = 0;
          if (range.size() == begun) {
            ++next;
            begun = 0;
          } else {
            begun += begin(range, begun);
          }
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
    RangeRead* whole = nullptr;
    RangeRead range;  // the part of it that is read
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

  bool in_place(const RangeRead& range) const noexcept {
    const uint32_t alignment = files_.alignment(range.file);
    return range.head.empty() && range.offset % alignment == 0 && range.size() % alignment == 0 &&
           reinterpret_cast<uintptr_t>(range.into.data()) % alignment == 0;
  }

  // Begins to read the range from its byte `begun` on, and gives the bytes that this brings.
  uint64_t begin(RangeRead& whole, uint64_t begun) {
    const uint64_t rest = whole.size() - begun;
    if (!ring_.usable()) {
      bytes_ += rest;
      const int error = read_now(files_, part_of(whole, begun, rest), false, fallback_);
      if (error != 0) whole.error = error;
      return rest;
    }
    const bool direct =
        files_.direct(whole.file) >= 0 && (files_.policy() == Direct::always || whole.once);
    const unsigned index = free_.back();
    Slot& s = slots_[index];
    s.whole = &whole;
    s.direct = direct;
    s.range = direct && !in_place(whole) ? direct_part_of(whole, begun)
                                         : part_of(whole, begun, std::min(rest, kMostAtOnce));
    submit(s, index);
    free_.pop_back();
    return s.range.size();
  }

  void submit(Slot& s, unsigned index) {
    const RangeRead& range = s.range;
    if (s.direct) {
      if (!tried_to_pin_) {
        tried_to_pin_ = true;
        pinned_ = pin() >= 0;
      }
      s.aligned = align(range.offset, range.size(), files_.alignment(range.file));
      bytes_ += s.aligned.length;
      const auto length = static_cast<unsigned>(s.aligned.length);
      const int fd = files_.direct(range.file);
      s.in_place = in_place(range);
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
    const RangeRead& range = s.range;
    const uint64_t needed = s.direct ? s.aligned.skip + range.size() : range.size();
    if (result >= 0 && static_cast<uint64_t>(result) >= needed) {
      if (s.direct && !s.in_place) scatter(range, s.landed.data() + s.aligned.skip);
      return;
    }
    int error = result == 0 ? source::kSizeChanged : -result;
    if (result > 0 || result == -EINTR || result == -EAGAIN || result == -EINVAL ||
        result == -EOPNOTSUPP || result == -ENOMEM || result == -ECANCELED) {
      // Rare: cut short, given up, or not to the file system's taste. A plain call finishes it.
      error = read_now(files_, range, false, fallback_);
    }
    if (error != 0) s.whole->error = error;
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
