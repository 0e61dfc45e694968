// source/beside.h - samples whose record is the records of several sources, one after the other.
//
// Sample i is sample i of every source: the ids of a unit of tokens, then its mask, then its images.
// A field is the records of one source, or of several that follow each other.
// Thread-safety: as of Source.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "source/source.h"

namespace nostall::source {

class BesideSource : public Source {
 public:
  // The records of sources [first, last].
  struct Field {
    uint32_t first = 0, last = 0;
  };
  // Throws Error(usage) if there is no source, one has another number of samples, or a field is none.
  BesideSource(std::vector<std::shared_ptr<const Source>> sources, std::vector<Field> fields);

  uint64_t size() const override { return sizes_.size(); }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return sources_.front()->labels(); }
  uint64_t total_bytes() const override { return total_; }
  uint64_t fingerprint() const override { return fingerprint_; }
  uint64_t stamp() const override;
  uint64_t files_stamp() const override;
  bool stamp_covers_samples() const override;
  bool stamp_tells_content() const override;
  // That of the first source.
  std::string describe(uint64_t sample) const override {
    return sources_.front()->describe(sample);
  }
  std::unique_ptr<Reader> make_reader(ReaderKind kind, unsigned depth) const override;
  uint32_t fields() const override { return static_cast<uint32_t>(fields_.size()); }
  Result<std::monostate> locate(uint64_t sample, std::span<const std::byte> record,
                                std::span<FieldBytes> out) const override;
  Shareable* shareable() const override { return sources_.front()->shareable(); }

 private:
  class AllReader;

  std::vector<std::shared_ptr<const Source>> sources_;
  std::vector<Field> fields_;
  std::vector<uint64_t> sizes_;
  uint64_t total_ = 0, fingerprint_ = 0;
};

}  // namespace nostall::source
