// Reads ahead while requests move forward by small steps, and little after a jump.
#include "records/file_window.h"

#include <algorithm>

#include "base/clock.h"

namespace nostall::records {
namespace {

constexpr size_t kLeast = 4096;
// What is read at once through jumps, and the longest jump for which that is tried.
constexpr uint64_t kThrough = 2 << 20, kMostJump = kThrough / 2;
// A read that takes less is not worth avoiding.
constexpr double kSlow = 1e-3;
constexpr double kNewest = 0.25;  // weight of a measurement

void average(double& value, double measured) {
  value = value == 0.0 ? measured : value + kNewest * (measured - value);
}

}  // namespace

bool FileWindow::worth_reading_through(uint64_t offset) {
  const uint64_t end = begin_ + bytes_.size();
  if (storage_.is_local()) return false;  // a page cache reads ahead, and others share the disk
  if (offset < end || offset - end > kMostJump || bytes_.empty()) return false;
  // What is left of a jump where a window that went through many ends says nothing of them.
  if (bytes_.size() < kMostJump) average(skipped_, static_cast<double>(offset - end));
  return skipping_ >= kSlow && through_ * skipped_ < skipping_;  // tried once in any case
}

void FileWindow::measured(uint64_t bytes, double seconds) {
  if (bytes < kMostJump) {
    average(skipping_, seconds);
  } else {
    average(through_, seconds / static_cast<double>(bytes));
  }
}

std::span<const std::byte> FileWindow::get(uint64_t offset, size_t size) {
  error_.reset();
  if (size == 0 || offset > file_size() || size > file_size() - offset) return {};
  if (offset >= begin_ && offset + size <= begin_ + bytes_.size()) {
    return std::span<const std::byte>(bytes_).subspan(offset - begin_, size);
  }
  // Read on while it goes on close by; little at a time after a jump.
  const uint64_t end = begin_ + bytes_.size();
  const bool close = offset >= begin_ && offset <= end + ahead_;
  ahead_ = close ? std::min(most_, ahead_ * 2) : std::max(kLeast, ahead_ / 2);
  const uint64_t begin = offset / kLeast * kLeast;
  const bool through = worth_reading_through(offset);
  const uint64_t wanted =
      std::max<uint64_t>(offset + size, begin + (through ? kThrough : uint64_t{ahead_}));
  bytes_.resize(std::min(file_size(), wanted) - begin);
  begin_ = begin;
  RangeRead r;
  r.file = file_;
  r.offset = begin;
  r.into = bytes_;
  const int64_t asked = now_ns();
  reader_.read({&r, 1});
  if (r.error != 0) {
    bytes_.clear();
    error_ = Error(ErrorKind::io,
                   "cannot read " + path() + " at offset " + std::to_string(begin) + ": " +
                       (r.why.empty() ? source::read_error_text(r.error) : r.why),
                   r.error);
    return {};
  }
  measured(r.size(), static_cast<double>(now_ns() - asked) * 1e-9);
  return std::span<const std::byte>(bytes_).subspan(offset - begin_, size);
}

}  // namespace nostall::records
