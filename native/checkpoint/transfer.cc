// Copies files with a checksum for each block, and reads them into memory that is checked.
#include "checkpoint/transfer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/crew.h"
#include "base/error.h"
#include "base/mutex.h"
#include "checkpoint/crew.h"
#include "checkpoint/output.h"

namespace nostall::checkpoint {
// A file that is read in blocks, past the page cache where that goes.
class Input {
 public:
  Input(const std::string& path, uint64_t size, FileSystem& files) : path_(path), files_(files) {
    const int fd = files.open(path, O_RDONLY);
    if (fd < 0) throw io_error("cannot open the checkpoint's file", path, -fd);
    buffered_ = Descriptor(fd);
    struct stat status {};
    if (::fstat(fd, &status) != 0) {
      throw io_error("cannot look at the checkpoint's file", path, errno);
    }
    if (static_cast<uint64_t>(status.st_size) != size) {
      throw Error(ErrorKind::corruption, path + " has " + std::to_string(status.st_size) +
                                             " bytes, its manifest says " + std::to_string(size));
    }
    const int direct = files.open(path, O_RDONLY | O_DIRECT);
    if (direct >= 0) direct_ = Descriptor(direct);
  }

  // Fills `block` from its place; `want` bytes of it are the file's.
  void read(std::span<std::byte> block, uint64_t offset, uint64_t want) {
    if (direct_) {
      const int64_t got = files_.pread(direct_.get(), block.first(padded(want)), offset);
      if (got >= static_cast<int64_t>(want)) return;
      if (got < 0 && got != -EINVAL) throw io_error("cannot read", path_, static_cast<int>(-got));
    }
    const int64_t got = files_.pread(buffered_.get(), block.first(want), offset);
    if (got < 0) throw io_error("cannot read", path_, static_cast<int>(-got));
    if (got < static_cast<int64_t>(want)) {
      throw Error(ErrorKind::corruption, path_ + " ends before its size");
    }
  }

 private:
  std::string path_;
  FileSystem& files_;
  Descriptor buffered_, direct_;
};

namespace {

uint64_t length_of(uint64_t block, uint64_t size) {
  return std::min(kBlock, size - block * kBlock);
}

void check_count(const std::string& path, uint64_t size, uint64_t crcs) {
  if (blocks_of(size) != crcs) {
    throw Error(ErrorKind::usage, path + " of " + std::to_string(size) + " bytes has " +
                                      std::to_string(blocks_of(size)) + " blocks, not " +
                                      std::to_string(crcs));
  }
}

}  // namespace

FileCopy::FileCopy(std::string from, std::string to, uint64_t size, std::vector<uint32_t> crcs,
                   WriteOptions options, std::shared_ptr<Gate> gate, FileSystem& files)
    : from_(std::move(from)),
      to_(std::move(to)),
      size_(size),
      crcs_(std::move(crcs)),
      options_(options),
      gate_(std::move(gate)),
      files_(files),
      pace_(options.rate) {
  check_count(from_, size_, crcs_.size());
}

Written FileCopy::run() {
  const int64_t began = now_ns();
  Input input(from_, size_, files_);
  Output output(to_, size_, options_.direct, files_);
  work_lowered(lowered_, options_.priority, 1, [&] { return copy_next(input, output); });
  output.finish();
  Written written;
  written.size = size_;
  written.crcs = crcs_;
  written.direct = output.is_direct();
  written.seconds = static_cast<double>(now_ns() - began) * 1e-9;
  written.cpu_seconds = static_cast<double>(cpu_ns_) * 1e-9;
  return written;
}

void FileCopy::hurry() {
  hurried_ = true;
  pace_.lift();
  lowered_.raise();
}

bool FileCopy::copy_next(Input& input, Output& output) {
  const uint64_t i = next_.fetch_add(1);
  if (i >= crcs_.size()) return false;
  const int64_t cpu = thread_cpu_ns();
  thread_local Memory buffer;
  if (buffer.size() == 0) buffer = Memory(kBlock, 1);
  const std::span<std::byte> block{buffer.data(), kBlock};
  const uint64_t size = length_of(i, size_);
  const auto patience = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(options_.gate_patience));
  if (gate_ && !hurried_) gate_->wait_open(patience, options_.considerate);
  pace_.take(size);
  if (stopped_) throw Error(ErrorKind::stopped, "copying " + from_ + " was stopped");
  input.read(block, i * kBlock, size);
  if (crc32c(block.first(size)) != crcs_[i]) {
    throw Error(ErrorKind::corruption, from_ + " is damaged in bytes " +
                                           std::to_string(i * kBlock) + " to " +
                                           std::to_string(i * kBlock + size));
  }
  std::fill(block.begin() + static_cast<ptrdiff_t>(size),
            block.begin() + static_cast<ptrdiff_t>(padded(size)), std::byte{0});
  const int64_t error = output.write(block.first(padded(size)), i * kBlock);
  if (error < 0) throw io_error("cannot write the checkpoint's file", to_, int(-error));
  cpu_ns_ += thread_cpu_ns() - cpu;
  return true;
}

CheckedFile::CheckedFile(std::string path, uint64_t size, std::vector<uint32_t> crcs,
                         FileSystem& files)
    : size_(size), crcs_(std::move(crcs)) {
  check_count(path, size_, crcs_.size());
  input_ = std::make_unique<Input>(path, size_, files);
}

CheckedFile::~CheckedFile() = default;

ReadReport CheckedFile::read(uint64_t first, uint64_t count, std::byte* into, unsigned threads,
                             std::atomic<uint64_t>* progress, Priority priority) const {
  const int64_t began = now_ns();
  const uint64_t end = first + count;
  if (end < first || end > crcs_.size()) {
    throw Error(ErrorKind::usage, "there are " + std::to_string(crcs_.size()) +
                                      " blocks, none from " + std::to_string(first) + " to " +
                                      std::to_string(end));
  }
  std::atomic<uint64_t> next{first};
  Mutex mutex;
  ReadReport report;
  share(static_cast<unsigned>(std::min<uint64_t>(threads, count)), [&](bool own_thread) {
    if (own_thread) set_priority(priority);
    Memory own(into != nullptr ? 0 : kBlock, 1);
    for (uint64_t i; (i = next.fetch_add(1)) < end;) {
      std::byte* at = into != nullptr ? into + (i - first) * kBlock : own.data();
      const uint64_t want = length_of(i, size_);
      input_->read({at, kBlock}, i * kBlock, want);
      if (crc32c({at, want}) != crcs_[i]) {
        const MutexLock lock(mutex);
        report.damaged.push_back(i);
      }
      if (progress != nullptr) *progress += want;
    }
  });
  std::sort(report.damaged.begin(), report.damaged.end());
  report.seconds = static_cast<double>(now_ns() - began) * 1e-9;
  return report;
}

ReadReport read_checked(const std::string& path, uint64_t size, std::span<const uint32_t> crcs,
                        Memory* into, unsigned threads, std::atomic<uint64_t>* progress,
                        Priority priority, FileSystem& files) {
  const CheckedFile file(path, size, {crcs.begin(), crcs.end()}, files);
  if (into != nullptr && into->size() < blocks_of(size) * kBlock) {
    throw Error(ErrorKind::usage, "the memory for " + path + " is too small");
  }
  return file.read(0, crcs.size(), into != nullptr ? into->data() : nullptr, threads, progress,
                   priority);
}

}  // namespace nostall::checkpoint
