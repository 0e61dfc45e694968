// Many files at once from one thread: open and read of each file are linked, `depth` pairs in
// flight.
#include <cstring>

#include "source/folder.h"

#if defined(NOSTALL_HAVE_URING)
#include <fcntl.h>
#include <liburing.h>
#include <sys/uio.h>

#include <system_error>
#endif

namespace nostall::source {

#if defined(NOSTALL_HAVE_URING)
namespace {

class UringReader : public Reader {
 public:
  UringReader(const FolderSource& source, unsigned depth) : source_(source), slots_(depth) {}
  ~UringReader() override {
    if (ready_) io_uring_queue_exit(&ring_);
  }
  UringReader(const UringReader&) = delete;
  UringReader& operator=(const UringReader&) = delete;

  // 0 or -errno.
  int start() {
    const auto depth = static_cast<unsigned>(slots_.size());
    const int error = io_uring_queue_init(4 * depth, &ring_, 0);
    if (error < 0) return error;
    ready_ = true;
    return io_uring_register_files_sparse(&ring_, depth);
  }

  void read(std::span<ReadRequest> requests) override {
    // A slot of the ring's file table serves one file at a time.
    size_t next = 0, flying = 0;
    std::vector<unsigned> free;
    for (unsigned i = 0; i < slots_.size(); ++i) free.push_back(i);
    while (next < requests.size() || flying > 0) {
      while (next < requests.size() && !free.empty()) {
        submit(requests[next++], free.back());
        free.pop_back();
        ++flying;
      }
      int error = 0;
      do {
        error = io_uring_submit_and_wait(&ring_, 1);
      } while (error == -EINTR);
      unsigned head = 0, seen = 0;
      io_uring_cqe* cqe = nullptr;
      io_uring_for_each_cqe(&ring_, head, cqe) {
        ++seen;
        const auto slot = static_cast<unsigned>(cqe->user_data >> 2);
        Slot& s = slots_[slot];
        const auto step = cqe->user_data & 3;
        if (step == kOpen) s.opened = cqe->res;
        if (step == kRead) s.read = cqe->res;
        if (--s.left > 0) continue;
        finish(s);
        free.push_back(slot);
        --flying;
      }
      io_uring_cq_advance(&ring_, seen);
    }
  }
  std::string_view name() const override { return "io_uring"; }

 private:
  enum Step : uint64_t { kOpen = 0, kRead = 1, kClose = 2 };
  struct Slot {
    ReadRequest* request = nullptr;
    std::string path;
    std::byte extra{};
    iovec parts[2]{};
    int opened = 0, read = 0, left = 0;
  };

  void submit(ReadRequest& request, unsigned slot) {
    Slot& s = slots_[slot];
    s.request = &request;
    s.path.assign(source_.index().path(request.sample));
    s.parts[0] = {request.into.data(), request.into.size()};
    s.parts[1] = {&s.extra, 1};
    s.opened = s.read = 0;
    s.left = 3;
    // Hard links: the close comes whatever the read gave, so a slot is always free afterwards.
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_openat_direct(sqe, source_.root_fd(), s.path.c_str(), O_RDONLY, 0, slot);
    sqe->flags |= IOSQE_IO_HARDLINK;
    sqe->user_data = (uint64_t{slot} << 2) | kOpen;
    sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_readv(sqe, static_cast<int>(slot), s.parts, 2, 0);
    sqe->flags |= IOSQE_FIXED_FILE | IOSQE_IO_HARDLINK;
    sqe->user_data = (uint64_t{slot} << 2) | kRead;
    sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_close_direct(sqe, slot);
    sqe->user_data = (uint64_t{slot} << 2) | kClose;
  }

  void finish(Slot& s) {
    const size_t size = s.request->into.size();
    if (s.opened < 0) {
      s.request->error = -s.opened;
    } else if (s.read == -EINTR || s.read == -EAGAIN ||
               (s.read > 0 && static_cast<size_t>(s.read) < size)) {
      // Rare: finished, and its size judged, by the plain reader.
      if (!fallback_) fallback_ = make_pread_reader(source_);
      fallback_->read({s.request, 1});
    } else if (s.read < 0) {
      s.request->error = -s.read;
    } else {
      s.request->error = static_cast<size_t>(s.read) == size ? 0 : kSizeChanged;
    }
  }

  const FolderSource& source_;
  std::vector<Slot> slots_;
  std::unique_ptr<Reader> fallback_;
  io_uring ring_{};
  bool ready_ = false;
};

}  // namespace

std::unique_ptr<Reader> make_uring_reader(const FolderSource& source, unsigned depth,
                                          std::string& why) {
  auto reader = std::make_unique<UringReader>(source, std::max(1u, depth));
  if (const int error = reader->start(); error < 0) {
    why = "the kernel refuses it: " + std::generic_category().message(-error);
    return nullptr;
  }
  return reader;
}
#else
std::unique_ptr<Reader> make_uring_reader(const FolderSource&, unsigned, std::string& why) {
  why = "this build has no liburing";
  return nullptr;
}
#endif

}  // namespace nostall::source
