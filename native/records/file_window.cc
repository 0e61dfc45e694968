// Reads ahead while requests move forward by small steps, and little after a jump.
#include "records/file_window.h"

#include <algorithm>

namespace nostall::records {
namespace {

constexpr size_t kLeast = 4096;

}  // namespace

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
  const uint64_t wanted = std::max<uint64_t>(offset + size, begin + ahead_);
  bytes_.resize(std::min(file_size(), wanted) - begin);
  begin_ = begin;
  RangeRead r;
  r.file = file_;
  r.offset = begin;
  r.into = bytes_;
  reader_.read({&r, 1});
  if (r.error != 0) {
    bytes_.clear();
    error_ = Error(ErrorKind::io,
                   "cannot read " + path() + " at offset " + std::to_string(begin) + ": " +
                       (r.why.empty() ? source::read_error_text(r.error) : r.why),
                   r.error);
    return {};
  }
  return std::span<const std::byte>(bytes_).subspan(offset - begin_, size);
}

}  // namespace nostall::records
