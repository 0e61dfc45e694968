// records/records.h - samples that are ranges of a few large files: databases, archives, objects.
//
// A RecordTable says where every sample lies. It is made by a scanner (lmdb.h, tar.h, tfrecord.h)
// or by the caller, and kept in a stored form (docs/formats/records.md): the provenance index of
// [Pumma 2020, sec. 5.2.2], which stores places and does not compute them. parse_records is total:
// any bytes give a table or an Error of kind corruption.
// A RecordSource reads the samples of a table from a Storage: what is wanted at the same time and
// lies close together is read in one operation.
// Thread-safety: values; RecordSource is immutable after construction but for its measurements.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "base/shareable.h"
#include "records/coalesce.h"
#include "records/ranges.h"
#include "source/source.h"

namespace nostall::records {

inline constexpr uint32_t kRecordsMagic = 0x52534e31;  // "1NSR"
inline constexpr uint32_t kNoPart = std::numeric_limits<uint32_t>::max();
inline constexpr uint32_t kMostParts = 1024;
// In a stamp, before the version of the rules by which a scan chose the samples. It is no part of the
// fingerprint: of files in which the rules choose the same samples, states and tiers still hold.
inline constexpr std::string_view kRules = " rules ";

template <template <typename> typename Column>
struct BasicTable {
  std::string kind;   // "lmdb", "tar", ...
  std::string stamp;  // what the places depend on: a table with another stamp is another one
  std::vector<StorageFile> files;
  // One entry per sample. `file` is empty if there is only one file, `head` if no sample has bytes
  // before it to check.
  Column<uint32_t> file;
  Column<uint64_t> offset, length;
  Column<int64_t> label;
  Column<uint16_t> head;
  // Fields whose bytes are parts of the record; 0: a sample is one image and its label. Of each
  // sample in turn, where each field begins in its record and its length; kNoPart and 0 if the
  // sample lacks it.
  uint32_t parts = 0;
  Column<uint32_t> part_offset, part_length;

  uint64_t size() const noexcept { return length.size(); }
  uint32_t file_of(uint64_t sample) const noexcept { return file.empty() ? 0 : file[sample]; }
  uint64_t head_of(uint64_t sample) const noexcept { return head.empty() ? 0 : head[sample]; }
};
template <typename T>
using Grown = std::vector<T>;
template <typename T>
using Kept = std::span<const T>;
using RecordTable = BasicTable<Grown>;  // as it is made
using KeptTable = BasicTable<Kept>;     // of a source, in memory that a node has once

std::vector<std::byte> serialize_records(const RecordTable& table);
Result<RecordTable> parse_records(std::span<const std::byte> bytes);

// Looks at the bytes before a sample and returns why they cannot be right, or an empty string.
using CheckHead = std::function<std::string(const KeptTable& table, uint64_t sample,
                                            std::span<const std::byte> head)>;
// The name of a sample inside its file, for messages; may read. Empty: none.
using NameOf = std::function<std::string(const KeptTable& table, uint64_t sample)>;

// Whether a file still holds what the table was made from, by what the format itself says.
using SameFile = std::function<bool(RangeReader& reader, const KeptTable& table, uint32_t file)>;
// A number that a later state of the file does not have, at the cost of a microsecond; nothing where it
// cannot be had. For writers whose writing changes no time, as to a file that is mapped.
using StateOf = std::function<std::optional<uint64_t>(uint32_t file)>;

struct RecordOptions {
  uint64_t max_read = uint64_t{4} << 20;  // bytes of one coalesced read
  bool coalesce = true;
  CheckHead check;
  NameOf name;
  SameFile same;  // empty: the format says nothing
  StateOf state;  // with `same`; empty: none
};

class RecordSource : public source::Source {
 public:
  // Throws Error(corruption) if a sample lies outside its file, or a part outside its record.
  RecordSource(std::shared_ptr<const Storage> storage, RecordTable table, RecordOptions options);

  uint64_t size() const override { return table_.size(); }
  std::span<const uint64_t> sizes() const override { return table_.length; }
  std::span<const int64_t> labels() const override { return table_.label; }
  uint64_t total_bytes() const override { return total_bytes_; }
  uint64_t fingerprint() const override { return fingerprint_; }
  uint64_t stamp() const override { return storage_->stamp(); }
  bool stamp_covers_samples() const override { return true; }
  bool stamp_tells_content() const override { return storage_->times_tell_content(); }
  bool is_local() const override { return storage_->is_local(); }
  std::string describe(uint64_t sample) const override;
  std::unique_ptr<source::Reader> make_reader(source::ReaderKind kind,
                                              unsigned depth) const override;
  uint32_t fields() const override { return table_.parts == 0 ? 2 : table_.parts; }
  Result<std::monostate> locate(uint64_t sample, std::span<const std::byte> record,
                                std::span<source::FieldBytes> out) const override;
  uint64_t batch_bytes() const override;
  void around(uint64_t sample, std::vector<uint64_t>& out) const override;
  Shareable* shareable() const override { return block_.get(); }

  const KeptTable& table() const noexcept { return table_; }
  const Storage& storage() const noexcept { return *storage_; }
  const RecordOptions& options() const noexcept { return options_; }
  // Why samples of a file cannot be read any more, or an empty string. A file that was touched is
  // still the same if a few of its samples still have the checksums that are known; `reader` reads
  // them again.
  std::string changed(uint32_t file, RangeReader& reader) const;
  // For changed(): a sample that was read while its file was the one that was opened.
  void remember(uint64_t sample, std::span<const std::byte> bytes) const;
  StorageCost& cost() const noexcept { return cost_; }
  // What to read together now.
  CoalesceLimits limits() const {
    return cost_.limits(options_.max_read, total_bytes_ / std::max<uint64_t>(1, size()));
  }

 private:
  void keep(RecordTable table, std::vector<uint32_t> by_place, std::vector<uint32_t> places);
  // Positions of samples by place, unless they lie in order anyway.
  uint64_t place_of(uint64_t sample) const noexcept;
  uint64_t sample_at(uint64_t place) const noexcept;

  std::shared_ptr<const Storage> storage_;
  RecordOptions options_;
  uint64_t total_bytes_ = 0, fingerprint_ = 0;
  std::unique_ptr<Shareable> block_;  // what these lie in:
  KeptTable table_;
  std::span<const uint32_t> by_place_, places_;
  mutable StorageCost cost_;

  struct Remembered {
    uint64_t sample = 0;
    uint32_t sum = 0;
  };
  struct Content {
    std::atomic<uint32_t> count{0};  // of `remembered`
    std::vector<Remembered> remembered;
    Storage::Touched same;  // a later state of the file, in which the content was still the same
    std::atomic<uint64_t> state{0};  // StateOf in which `same` held; 0: none yet
  };
  mutable Mutex contents_mutex_;
  mutable std::vector<Content> contents_;  // of each file; guarded, but for the counts
};

}  // namespace nostall::records
