// Many files at once from one thread: open and read of each file are linked, `depth` pairs in
// flight.
#include <cstring>

#include "source/folder.h"

#if defined(NOSTALL_HAVE_URING)
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <system_error>

#include "base/ring.h"
#endif

namespace nostall::source {

#if defined(NOSTALL_HAVE_URING)
namespace {

class UringReader : public Reader {
 public:
  UringReader(const FolderSource& source, unsigned depth)
      : source_(source),
        slots_(depth),
        plain_(make_pread_reader(source)),
        ring_(source.ring_refused()) {}

  // 0 or -errno.
  int start() {
    const auto depth = static_cast<unsigned>(slots_.size());
    const int error = ring_.start(4 * depth, 0);
    return error < 0 ? error : io_uring_register_files_sparse(ring_.get(), depth);
  }

  void read(std::span<ReadRequest> requests) override {
    again_.clear();
    again_.reserve(requests.size());
    free_.clear();
    for (unsigned i = 0; i < slots_.size(); ++i) free_.push_back(i);
    size_t next = 0;
    try {
      while (next < requests.size() || free_.size() < slots_.size()) {
        // A slot of the ring's file table serves one file at a time.
        while (next < requests.size() && !free_.empty() && ring_.usable()) {
          begin(requests[next], free_.back());
          free_.pop_back();
          ++next;
        }
        if (free_.size() == slots_.size()) break;  // the ring was given up
        ring_.collect(1, [this](uint64_t data, int result) { completed(data, result); });
      }
    } catch (...) {
      ring_.drain();
      throw;
    }
    for (ReadRequest* request : again_) plain_->read({request, 1});
    plain_->read(requests.subspan(next));
  }
  std::string_view name() const override { return ring_.usable() ? "io_uring" : plain_->name(); }

 private:
  enum Step : uint64_t { kOpen = 0, kRead = 1, kClose = 2, kLook = 3 };
  struct Slot {
    ReadRequest* request = nullptr;
    std::string path;
    std::byte extra{};
    iovec parts[2]{};
    struct statx status {};
    int opened = 0, read = 0, left = 0;
  };

  void begin(ReadRequest& request, unsigned slot) {
    Slot& s = slots_[slot];
    s.request = &request;
    s.path.assign(source_.listing().path(request.sample));
    s.parts[0] = {request.into.data(), request.into.size()};
    s.parts[1] = {&s.extra, 1};
    s.opened = s.read = 0;
    if (!look_first_) {
      open_and_read(slot);
      return;
    }
    s.left = 1;
    io_uring_sqe* sqe = ring_.next();
    io_uring_prep_statx(sqe, source_.root_fd(), s.path.c_str(), 0, STATX_TYPE, &s.status);
    ring_.add(sqe, (uint64_t{slot} << 2) | kLook);
  }

  void open_and_read(unsigned slot) noexcept {
    Slot& s = slots_[slot];
    s.left = 3;
    // Not to wait for a writer if a pipe took the file's place.
    const int flags = O_RDONLY | (look_first_ ? 0 : O_NONBLOCK);
    // Hard links: the close comes whatever the read gave, so a slot is always free afterwards.
    io_uring_sqe* sqe = ring_.next();
    io_uring_prep_openat_direct(sqe, source_.root_fd(), s.path.c_str(), flags, 0, slot);
    sqe->flags |= IOSQE_IO_HARDLINK;
    ring_.add(sqe, (uint64_t{slot} << 2) | kOpen);
    sqe = ring_.next();
    io_uring_prep_readv(sqe, static_cast<int>(slot), s.parts, 2, 0);
    sqe->flags |= IOSQE_FIXED_FILE | IOSQE_IO_HARDLINK;
    ring_.add(sqe, (uint64_t{slot} << 2) | kRead);
    sqe = ring_.next();
    io_uring_prep_close_direct(sqe, slot);
    ring_.add(sqe, (uint64_t{slot} << 2) | kClose);
  }

  void completed(uint64_t data, int result) noexcept {
    const auto slot = static_cast<unsigned>(data >> 2);
    Slot& s = slots_[slot];
    const auto step = data & 3;
    if (step == kLook && result == 0 && S_ISREG(s.status.stx_mode) && ring_.usable()) {
      open_and_read(slot);
      return;
    }
    if (step == kOpen) s.opened = result;
    if (step == kRead) s.read = result;
    if (--s.left > 0) return;
    // io_uring takes O_NONBLOCK to mean that a read which would wait fails, on file systems (of
    // networks, mostly) that do not know beforehand: there the file's type is read first.
    if (s.opened >= 0 && s.read == -EAGAIN) look_first_ = true;
    if (step != kLook && s.opened >= 0 && s.read == static_cast<int64_t>(s.request->into.size())) {
      s.request->error = 0;
    } else {
      // Rare: a plain call finishes it, or fails with the reason.
      again_.push_back(s.request);
    }
    free_.push_back(slot);
  }

  const FolderSource& source_;
  std::vector<Slot> slots_;
  std::vector<unsigned> free_;
  std::vector<ReadRequest*> again_;
  std::unique_ptr<Reader> plain_;
  bool look_first_ = false;
  Ring ring_;
};

}  // namespace

std::unique_ptr<Reader> make_uring_reader(const FolderSource& source, unsigned depth,
                                          std::string& why) {
  auto reader = std::make_unique<UringReader>(source, std::max(1u, depth));
  if (const int error = reader->start(); error < 0) {
    why = why_no_ring(error);
    return nullptr;
  }
  return reader;
}

std::string uring_problem() {
  std::atomic<bool> refused{false};
  Ring ring(refused);
  const int error = ring.start(1, 0);
  return error < 0 ? why_no_ring(error) : "";
}
#else
std::unique_ptr<Reader> make_uring_reader(const FolderSource&, unsigned, std::string& why) {
  why = uring_problem();
  return nullptr;
}

std::string uring_problem() { return "this build has no liburing"; }
#endif

}  // namespace nostall::source
