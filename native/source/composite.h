// source/composite.h - samples whose fields are samples of another source, and columns in memory.
//
// A composite has one field for each kind of part (files side by side, members of an archive), then
// one for each column. Its record is the bytes of the sample's parts, one after the other in the
// order of the fields; parts may be missing. Columns are known when the source is opened, and take
// no room in records. Parts are read by the readers of their own source, those of all requests
// together, so that as many reads are in flight as it allows.
// Thread-safety: as of Source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "source/source.h"

namespace nostall::source {

// One value of bytes for each sample, of equal or of different sizes.
struct Column {
  std::vector<std::byte> values;
  uint64_t width = 0;            // of every value; 0: see `ends`
  std::vector<uint64_t> ends;    // n + 1 of them: value i is [ends[i], ends[i + 1])
  std::vector<uint8_t> present;  // n of them, 0 where the sample has none; empty: all have one
};

inline constexpr uint32_t kNoPart = std::numeric_limits<uint32_t>::max();

class CompositeSource : public Source {
 public:
  struct Table {
    uint64_t samples = 0;
    std::vector<std::string> names;        // of the fields: those of parts, then those of columns
    std::shared_ptr<const Source> source;  // of the parts; null if there are none
    std::vector<uint32_t> parts;           // of sample 0, of sample 1, ...: ids, or kNoPart
    std::vector<Column> columns;
    std::vector<int64_t> labels;  // one a sample, or empty: all 0
  };
  // Throws Error(usage) if the table's columns do not go together.
  explicit CompositeSource(Table table);
  // The same samples with these fields alone, by their numbers, in rising order.
  std::shared_ptr<CompositeSource> select(std::span<const uint32_t> fields) const;

  uint64_t size() const override { return table_->samples; }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return table_->labels; }
  uint64_t total_bytes() const override { return total_; }
  uint64_t fingerprint() const override { return fingerprint_; }
  uint64_t stamp() const override;
  uint64_t files_stamp() const override;
  bool stamp_covers_samples() const override;
  bool stamp_tells_content() const override;
  // The name of the first part that there is.
  std::string describe(uint64_t sample) const override;
  std::unique_ptr<Reader> make_reader(ReaderKind kind, unsigned depth) const override;
  uint32_t fields() const override { return static_cast<uint32_t>(chosen_.size()); }
  Result<std::monostate> locate(uint64_t sample, std::span<const std::byte> record,
                                std::span<FieldBytes> out) const override;
  uint64_t batch_bytes() const override;
  void around(uint64_t sample, std::vector<uint64_t>& out) const override;
  // That of the parts.
  Shareable* shareable() const override {
    return table_->source ? table_->source->shareable() : nullptr;
  }

 private:
  class PartsReader;
  CompositeSource(std::shared_ptr<const Table> table, std::vector<uint32_t> chosen);
  size_t parts() const noexcept { return table_->names.size() - table_->columns.size(); }
  // The part of a sample for a chosen field, kNoPart if it has none.
  uint32_t part(uint64_t sample, uint32_t field) const noexcept {
    return table_->parts[sample * parts() + field];
  }

  std::shared_ptr<const Table> table_;
  std::vector<uint32_t> chosen_;  // numbers of fields; those of parts first
  size_t chosen_parts_ = 0;       // how many of them are of parts
  std::vector<uint64_t> sizes_;
  std::vector<uint32_t> sample_of_;  // of each part; empty without parts
  uint64_t total_ = 0, fingerprint_ = 0;
};

}  // namespace nostall::source
