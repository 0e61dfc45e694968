// source/index.h - the list of samples of a data set: paths, sizes, labels; and its stored form.
//
// The stored form (docs/formats/index.md, version 1) is little-endian and ends in a CRC32C.
// parse_index is the only code that reads it; it is total: any bytes give an index or an Error of
// kind corruption. An index grows; listing.h holds one that is complete. Thread-safety: values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace nostall::source {

// A directory as it was listed: a change of its entries changes its time.
struct ListedDirectory {
  std::string path;  // relative to the root; empty for the root
  int64_t mtime_ns = 0;
};

class SampleIndex {
 public:
  uint64_t size() const noexcept { return sizes_.size(); }
  // Relative to the root, or absolute for file lists.
  std::string_view path(uint64_t sample) const noexcept {
    return std::string_view(names_).substr(ends_[sample], ends_[sample + 1] - ends_[sample]);
  }
  // All paths one after the other, and where each begins, with the end of the last.
  std::string_view names() const noexcept { return names_; }
  const std::vector<uint64_t>& ends() const noexcept { return ends_; }
  const std::vector<uint64_t>& sizes() const noexcept { return sizes_; }
  const std::vector<int64_t>& labels() const noexcept { return labels_; }
  const std::vector<std::string>& classes() const noexcept { return classes_; }
  const std::vector<ListedDirectory>& directories() const noexcept { return directories_; }
  uint64_t total_bytes() const noexcept { return total_bytes_; }

  void add(std::string_view path, uint64_t size, int64_t label);
  void set_classes(std::vector<std::string> classes) { classes_ = std::move(classes); }
  void set_directories(std::vector<ListedDirectory> d) { directories_ = std::move(d); }
  // A hash of the times of all files as they were listed; the stored form has none.
  const std::optional<uint64_t>& times() const noexcept { return times_; }
  void set_times(std::optional<uint64_t> hash) { times_ = hash; }

  // FNV-1a, 64 bits, over paths, sizes, labels and classes: what makes two data sets the same.
  uint64_t fingerprint() const noexcept;

 private:
  std::string names_;
  std::vector<uint64_t> ends_{0};
  std::vector<uint64_t> sizes_;
  std::vector<int64_t> labels_;
  std::vector<std::string> classes_;
  std::vector<ListedDirectory> directories_;
  std::optional<uint64_t> times_;
  uint64_t total_bytes_ = 0;
};

// What the listing depended on beside the directory: an index made with other options is another
// one.
std::vector<std::byte> serialize_index(const SampleIndex& index, uint64_t options);
Result<SampleIndex> parse_index(std::span<const std::byte> bytes, uint64_t options);

// Whether a file is flushed before it takes the place of the one before. What can be made again from
// the data set is not: what a loss of power tears is detected by its checksum.
enum class Flush : bool { no, yes };
// Writes beside `path`, renames: readers see the old file or the new one. 0 or -errno.
int store_index(const std::string& path, std::span<const std::byte> bytes,
                FileSystem& files = FileSystem::real(), Flush flush = Flush::no);
// The same of bytes that lie in several places.
int store_parts(const std::string& path, std::initializer_list<std::span<const std::byte>> parts,
                FileSystem& files = FileSystem::real(), Flush flush = Flush::no);
inline constexpr uint32_t kIndexMagic = 0x49534e31;  // "1NSI"

struct StoredFile {
  Descriptor file;
  uint64_t size = 0;
};
// A file that begins with `magic`. Error(corruption) if it does not, is no regular file or is longer
// than `most` or a quarter of the machine's memory; Error(io) if it cannot be read.
Result<StoredFile> open_stored(const std::string& path, uint32_t magic,
                               uint64_t most = std::numeric_limits<uint64_t>::max(),
                               FileSystem& files = FileSystem::real());
// The whole of it.
Result<std::vector<std::byte>> load_bytes(const std::string& path, uint32_t magic,
                                          uint64_t most = std::numeric_limits<uint64_t>::max(),
                                          FileSystem& files = FileSystem::real());

}  // namespace nostall::source
