// source/folder.h - samples that are files.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "base/file.h"
#include "source/index.h"
#include "source/listing.h"
#include "source/source.h"

namespace nostall::source {

class FolderSource : public Source {
 public:
  // `root` is where the index's relative paths start. Throws Error(io) if it cannot be opened.
  FolderSource(std::string root, SampleIndex index, FileSystem& files = FileSystem::real());

  uint64_t size() const override { return listing_.size(); }
  std::span<const uint64_t> sizes() const override { return listing_.sizes(); }
  std::span<const int64_t> labels() const override { return listing_.labels(); }
  uint64_t total_bytes() const override { return listing_.total_bytes(); }
  uint64_t fingerprint() const override { return listing_.fingerprint(); }
  uint64_t stamp() const override { return stamp_; }
  uint64_t files_stamp() const override { return files_stamp_; }
  bool stamp_covers_samples() const override { return times_.has_value(); }
  std::string describe(uint64_t sample) const override;
  std::unique_ptr<Reader> make_reader(ReaderKind kind, unsigned depth) const override;
  Shareable* shareable() const override { return &listing_.block(); }

  const Listing& listing() const noexcept { return listing_; }
  const std::string& root() const noexcept { return root_; }
  int root_fd() const noexcept { return root_fd_.get(); }
  FileSystem& files() const noexcept { return files_; }
  // Whether the kernel refused the ring of one of the readers (ring.h).
  std::atomic<bool>& ring_refused() const noexcept { return ring_refused_; }

 private:
  std::string root_;
  std::optional<uint64_t> times_;  // SampleIndex::times()
  Listing listing_;
  uint64_t files_stamp_ = 0;
  uint64_t stamp_ = 0;
  FileSystem& files_;
  Descriptor root_fd_;
  mutable std::atomic<bool> ring_refused_{false};
};

// Readers over files; the source outlives them.
std::unique_ptr<Reader> make_pread_reader(const FolderSource& source);
// Null, and the reason in `why`, where the kernel or the build has no io_uring.
std::unique_ptr<Reader> make_uring_reader(const FolderSource& source, unsigned depth,
                                          std::string& why);
// Why this process cannot have an io_uring; empty if it can.
std::string uring_problem();
// Whichever of the two suits the storage: see source/reader_choice.h.
std::unique_ptr<Reader> make_adaptive_reader(const FolderSource& source, unsigned depth);

}  // namespace nostall::source
