// Reads records plainly while reads come from memory, and through an io_uring while they wait.
#include "tier/record_reader.h"

#include <algorithm>
#include <vector>

#include "base/clock.h"

#if defined(NOSTALL_HAVE_URING)
#include <sys/uio.h>

#include "base/ring.h"
#endif

namespace nostall::tier {

#if defined(NOSTALL_HAVE_URING)
class RecordReader::Rings {
 public:
  Rings(unsigned depth, std::atomic<bool>& refused) : slots_(depth), ring_(refused) {
    landed_.reserve(depth);
    // Completions are looked for when this thread waits anyway: no interrupt of its work.
    if (ring_.start(depth, IORING_SETUP_COOP_TASKRUN) < 0) ring_.start(depth, 0);
  }
  ~Rings() { ring_.drain(); }
  bool usable() const noexcept { return ring_.usable(); }

  void read(FileSystem& files, std::span<RecordRead> reads) {
    free_.clear();
    for (unsigned i = 0; i < slots_.size(); ++i) free_.push_back(i);
    landed_.clear();
    try {
      for (size_t next = 0; next < reads.size() || flying() > 0;) {
        while (next < reads.size() && !free_.empty()) {
          RecordRead& read = reads[next++];
          if (ring_.usable()) {
            submit(read);
          } else {
            read.sum = read_record(files, read.fd, read.offset, read.sample, read.into);
          }
        }
        if (flying() > 0) collect(files);
      }
    } catch (...) {
      ring_.drain();
      throw;
    }
  }

 private:
  struct Slot {
    RecordRead* read = nullptr;
    iovec parts[2]{};
    bool whole = false;
  };

  size_t flying() const noexcept { return slots_.size() - free_.size(); }

  void submit(RecordRead& read) {
    const unsigned index = free_.back();
    free_.pop_back();
    Slot& slot = slots_[index];
    slot.read = &read;
    slot.parts[0] = {read.header.data(), read.header.size()};
    slot.parts[1] = {read.into.data(), read.into.size()};
    io_uring_sqe* const entry = ring_.next();
    io_uring_prep_readv(entry, read.fd, slot.parts, 2, read.offset);
    ring_.add(entry, index);
  }

  void collect(FileSystem& files) {
    // To wait for a few at once costs no depth that matters, and saves a switch for each.
    const auto wait = static_cast<unsigned>(std::max<size_t>(1, flying() / 4));
    ring_.collect(wait, [this](uint64_t index, int result) {
      Slot& slot = slots_[index];
      const size_t size = slot.parts[0].iov_len + slot.parts[1].iov_len;
      slot.whole = result >= 0 && static_cast<size_t>(result) == size;
      landed_.push_back(static_cast<unsigned>(index));
    });
    // Checked while others are under way.
    for (const unsigned index : landed_) {
      RecordRead& read = *slots_[index].read;
      // What came short or not at all is read once more: a plain call says why.
      read.sum = slots_[index].whole
                     ? check_record(read.header, read.sample, read.into)
                     : read_record(files, read.fd, read.offset, read.sample, read.into);
      free_.push_back(index);
    }
    landed_.clear();
  }

  std::vector<Slot> slots_;
  std::vector<unsigned> free_;    // slots with nothing in flight
  std::vector<unsigned> landed_;  // read, not yet checked
  Ring ring_;
};
#else
class RecordReader::Rings {
 public:
  Rings(unsigned, std::atomic<bool>&) {}
  bool usable() const noexcept { return false; }
  void read(FileSystem&, std::span<RecordRead>) {}
};
#endif

RecordReader::RecordReader(unsigned depth, std::atomic<bool>& refused, ColdReads seen)
    : depth_(std::max(1u, depth)), refused_(refused), cold_(seen) {}
RecordReader::~RecordReader() = default;

bool RecordReader::many() const noexcept { return cold_.cold() && ring_ && ring_->usable(); }

void RecordReader::read(FileSystem& files, std::span<RecordRead> reads) {
  // What stands for the system's calls is to see each of them.
  const bool may = &files == &FileSystem::real();
  while (!reads.empty()) {
    if (may && reads.size() > 1 && cold_.many()) {
      if (!ring_) ring_ = std::make_unique<Rings>(depth_, refused_);
      if (ring_->usable()) {
        ring_->read(files, reads);
        return;
      }
    }
    RecordRead& read = reads.front();
    const int64_t begin = now_ns();
    read.sum = read_record(files, read.fd, read.offset, read.sample, read.into);
    cold_.took(read.into.size(), now_ns() - begin);
    reads = reads.subspan(1);
  }
}

}  // namespace nostall::tier
