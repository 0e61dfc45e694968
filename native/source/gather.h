// source/gather.h - several samples of another source as one: the images of a unit of tokens.
//
// Sample u is the samples `members` [begins[u], begins[u + 1]) of the other source. Its record is
// theirs, one after the other, zeros up to a multiple of 4, and a table, little-endian:
//
//   of each member three u32: the bytes of its record, and two numbers that come with it
//   the number of members, u32
//
// Records of the other source must be one field: what a member is lies in all of its record.
// Thread-safety: as of Source.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "source/source.h"

namespace nostall::source {

class GatherSource : public Source {
 public:
  struct Member {
    uint32_t sample = 0;             // of the other source
    uint32_t first = 0, second = 0;  // what comes with it: of images their place, and their tokens
  };
  // Throws Error(usage) if begins and members do not go together, a member is no sample, or a record
  // has 2^32 bytes.
  GatherSource(std::shared_ptr<const Source> source, std::vector<uint64_t> begins,
               std::vector<Member> members);

  uint64_t size() const override { return sizes_.size(); }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return labels_; }
  uint64_t total_bytes() const override { return total_; }
  uint64_t fingerprint() const override { return fingerprint_; }
  uint64_t stamp() const override { return source_->stamp(); }
  uint64_t files_stamp() const override { return source_->files_stamp(); }
  bool stamp_covers_samples() const override { return source_->stamp_covers_samples(); }
  bool stamp_tells_content() const override { return source_->stamp_tells_content(); }
  std::string describe(uint64_t sample) const override;
  std::unique_ptr<Reader> make_reader(ReaderKind kind, unsigned depth) const override;
  uint32_t fields() const override { return 1; }
  // The record.
  Result<std::monostate> locate(uint64_t sample, std::span<const std::byte> record,
                                std::span<FieldBytes> out) const override;

 private:
  class MembersReader;
  std::span<const Member> members_of(uint64_t sample) const noexcept {
    return std::span(members_).subspan(begins_[sample], begins_[sample + 1] - begins_[sample]);
  }

  std::shared_ptr<const Source> source_;
  std::vector<uint64_t> begins_;
  std::vector<Member> members_;
  std::vector<uint64_t> sizes_;
  std::vector<int64_t> labels_;
  uint64_t total_ = 0, fingerprint_ = 0;
};

// A checked record.
class GatheredView {
 public:
  struct Member {
    std::span<const std::byte> record;
    uint32_t first = 0, second = 0;
  };
  // Total: any bytes give members or an Error of kind corruption.
  static Result<GatheredView> of(std::span<const std::byte> record);

  uint32_t size() const noexcept { return count_; }
  // The next one; in turn, size() times.
  Member next() noexcept;

 private:
  uint32_t word(uint64_t at) const noexcept;
  std::span<const std::byte> record_;
  uint64_t at_ = 0, table_ = 0;
  uint32_t count_ = 0;
};

}  // namespace nostall::source
