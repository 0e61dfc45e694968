// source/view.h - samples of other sources in another choice and order, without a copy of them.
//
// A view is a list of numbers over its parts, laid end to end: sample i of the view is one sample of
// one part. Readers hand what is asked of them to the parts' readers, a part at a time, so that each
// part reads together what lies together. Checksums are the parts' own.
// Memory for each sample, beside the gathered size and label: 4 bytes, 8 if the parts have 2^32
// samples or more; as much again where the numbers do not rise.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "source/source.h"

namespace nostall::source {

class ViewSource : public Source {
 public:
  struct Part {
    std::shared_ptr<const Source> source;
    int64_t label_offset = 0;  // added to its labels, of sources with no more than a label
  };
  // Without `numbers`: all samples of all parts. Throws Error(usage) for a number that no part has,
  // and for parts with different fields.
  ViewSource(std::vector<Part> parts, std::optional<std::span<const uint64_t>> numbers);

  uint64_t size() const override { return sizes_.size(); }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return labels_; }
  uint64_t total_bytes() const override { return total_bytes_; }
  uint64_t fingerprint() const override { return fingerprint_; }
  uint64_t stamp() const override;
  uint64_t files_stamp() const override;
  bool stamp_covers_samples() const override;
  bool stamp_tells_content() const override;
  bool is_local() const override;
  std::string describe(uint64_t sample) const override;
  std::unique_ptr<Reader> make_reader(ReaderKind kind, unsigned depth) const override;
  uint32_t fields() const override { return parts_.front().source->fields(); }
  Result<std::monostate> locate(uint64_t sample, std::span<const std::byte> record,
                                std::span<FieldBytes> out) const override;
  uint64_t batch_bytes() const override;
  uint32_t made_at_once() const override;
  void around(uint64_t sample, std::vector<uint64_t>& out) const override;
  const std::string& sums_file_of(uint64_t sample) const override;

  const std::vector<Part>& parts() const noexcept { return parts_; }
  // The place of a sample among those of all parts.
  uint64_t number(uint64_t sample) const noexcept;
  // Its part, and its number there.
  std::pair<size_t, uint64_t> origin(uint64_t sample) const noexcept;

 private:
  // Numbers of four bytes where that is enough.
  class Numbers {
   public:
    void take(std::span<const uint64_t> numbers, bool wide);
    bool empty() const noexcept { return narrow_.empty() && wide_.empty(); }
    uint64_t operator[](uint64_t i) const noexcept { return wide_.empty() ? narrow_[i] : wide_[i]; }

   private:
    std::vector<uint32_t> narrow_;
    std::vector<uint64_t> wide_;
  };

  SampleSums make_sums() const override;
  size_t part_of(uint64_t number) const noexcept;
  // The first sample of the view with this number, if there is one.
  std::optional<uint64_t> find(uint64_t number) const noexcept;

  std::vector<Part> parts_;
  std::vector<uint64_t> begins_;  // the number of each part's first sample, then the end
  Numbers numbers_;               // empty: sample i has number i
  Numbers by_number_;             // samples in the order of their numbers; empty: that of the view
  std::vector<uint64_t> sizes_;
  std::vector<int64_t> labels_;
  uint64_t total_bytes_ = 0, fingerprint_ = 0;
  mutable std::vector<SampleSums*> sums_of_parts_;
};

}  // namespace nostall::source
