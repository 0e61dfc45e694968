// A file written past the page cache where the system allows it, and made durable at its end.
#include "checkpoint/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"

namespace nostall::checkpoint {

Output::Output(const std::string& path, uint64_t size, bool direct, FileSystem& files)
    : path_(path), size_(size), files_(files) {
  const int flags = O_WRONLY | O_CREAT;
  int fd = files.open(path, flags | O_TRUNC, 0644);
  if (fd < 0) throw io_error("cannot make the checkpoint's file", path, -fd);
  buffered_ = Descriptor(fd);
  if (direct) {
    fd = files.open(path, flags | O_DIRECT, 0644);
    if (fd >= 0) {
      file_ = Descriptor(fd);
      direct_ = true;
    }
  }
  // A device that is full, or fails, is found here, before the training's time is spent. A file
  // system that does not reserve says so when it is written.
  const int error = size > 0 ? -files_.reserve(buffered_.get(), size) : 0;
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  if (full || error == EIO) {
    // Some file systems keep what they had room for: others want it to say that this failed.
    files_.truncate(buffered_.get(), 0);
    throw io_error((full ? "no room for " : "cannot reserve ") + std::to_string(size) +
                       " bytes of a checkpoint",
                   path, error);
  }
}

int64_t Output::write(std::span<const std::byte> bytes, uint64_t offset) {
  if (direct_) {
    const int64_t done = files_.pwrite(file_.get(), bytes, offset);
    if (done != -EINVAL) return std::min<int64_t>(done, 0);
    direct_ = false;  // the file system takes the flag, and not the write
  }
  return write_buffered(bytes.first(std::min<uint64_t>(bytes.size(), size_ - offset)), offset);
}

int64_t Output::write_buffered(std::span<const std::byte> bytes, uint64_t offset) {
  const int64_t done = files_.pwrite(buffered_.get(), bytes, offset);
  if (done < 0) return done;
  // Written back now and dropped, so that neither dirty pages nor the cache grow.
  const int error = files_.write_back(buffered_.get(), offset, bytes.size());
  // A file system that does not know this call leaves all to fsync.
  if (error == -EINVAL || error == -ESPIPE || error == -ENOSYS || error == -EOPNOTSUPP) return 0;
  if (error != 0) return error;
  ::posix_fadvise(buffered_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes.size()),
                  POSIX_FADV_DONTNEED);
  return 0;
}

void Output::finish() {
  if (const int error = files_.truncate(buffered_.get(), size_); error != 0) {
    throw io_error("cannot set the size of the checkpoint's file", path_, -error);
  }
  if (const int error = files_.fsync(buffered_.get()); error < 0) {
    throw io_error("cannot make the checkpoint's file durable", path_, -error);
  }
}

}  // namespace nostall::checkpoint
