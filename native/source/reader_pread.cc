// One file after the other: open, read, close. The fastest way while the files are in memory.
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <string>

#include "source/folder.h"

namespace nostall::source {
namespace {

class PreadReader : public Reader {
 public:
  explicit PreadReader(const FolderSource& source) : source_(source) { path_.reserve(512); }

  void read(std::span<ReadRequest> requests) override {
    for (ReadRequest& r : requests) r.error = read_one(r);
  }
  std::string_view name() const override { return "pread"; }

 private:
  int read_one(const ReadRequest& request) {
    path_.assign(source_.listing().path(request.sample));  // for the terminating zero
    int fd = -1;
    do {
      // Not to wait for a writer if a pipe took the file's place.
      fd = ::openat(source_.root_fd(), path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) return errno;
    const Descriptor file(fd);
    // One byte more than expected shows, without another call, that the file has grown.
    std::byte extra{};
    iovec parts[2] = {{request.into.data(), request.into.size()}, {&extra, 1}};
    ssize_t n = 0;
    do {
      n = ::preadv(fd, parts, 2, 0);
    } while (n < 0 && errno == EINTR);
    if (n < 0) return errno;
    auto done = static_cast<size_t>(n);
    if (done > request.into.size()) return kSizeChanged;
    if (done == request.into.size()) return 0;
    const int64_t rest = source_.files().pread(fd, request.into.subspan(done), done);
    if (rest < 0) return static_cast<int>(-rest);
    return done + static_cast<size_t>(rest) == request.into.size() ? 0 : kSizeChanged;
  }

  const FolderSource& source_;
  std::string path_;
};

}  // namespace

std::unique_ptr<Reader> make_pread_reader(const FolderSource& source) {
  return std::make_unique<PreadReader>(source);
}

}  // namespace nostall::source
