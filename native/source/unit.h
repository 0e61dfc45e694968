// source/unit.h - the record of a unit of tokens: what readers of token files (room tokens) write,
// and room fields unpacks. Little-endian:
//
//   ids of all segments one after the other, each `width` bytes; zeros up to a multiple of 4
//   of each segment a u32: twice its length, and 1 more if one id follows that is only a label
//   the number of segments, u32
//
// A segment is a run of ids that belong together: attention and labels do not cross it. The id after
// it is there if the segment was cut out of a longer document, and not where the document ends.
// Thread-safety: values and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "base/error.h"

namespace nostall::source {

inline constexpr uint64_t kMostUnit = uint64_t{1} << 30;  // ids of one unit

constexpr uint64_t unit_table(uint64_t ids, uint64_t width) noexcept {
  return (ids * width + 3) / 4 * 4;  // where the table of segments begins
}
// Bytes of a record; `ids` counts those that are only labels.
constexpr uint64_t unit_bytes(uint64_t ids, uint64_t width, uint64_t segments) noexcept {
  return unit_table(ids, width) + 4 * segments + 4;
}

// A checked record.
class UnitView {
 public:
  struct Segment {
    uint32_t length = 0;
    bool next = false;
  };

  // Total: any bytes give a unit or an Error of kind corruption.
  static Result<UnitView> of(std::span<const std::byte> record, uint64_t width) {
    const auto damaged = [&] {
      return Error(ErrorKind::corruption, "a record of " + std::to_string(record.size()) +
                                              " bytes is no unit of tokens of " +
                                              std::to_string(width) + " bytes");
    };
    if (record.size() < 4 || record.size() % 4 != 0) return damaged();
    UnitView view;
    view.record_ = record;
    view.segments_ = view.word(record.size() - 4);
    if (view.segments_ > record.size() / 4 - 1) return damaged();
    view.table_ = record.size() - 4 - 4 * uint64_t{view.segments_};
    uint64_t ids = 0;
    for (uint32_t i = 0; i < view.segments_; ++i) {
      const Segment s = view.segment(i);
      ids += uint64_t{s.length} + (s.next ? 1 : 0);
      view.tokens_ += s.length;
    }
    if (ids > kMostUnit || unit_table(ids, width) != view.table_) return damaged();
    return view;
  }

  // The one that ends where `bytes` end, behind other records.
  static Result<UnitView> last_of(std::span<const std::byte> bytes, uint64_t width) {
    UnitView view;
    view.record_ = bytes;
    uint64_t size = 4;
    if (bytes.size() >= 4 && bytes.size() % 4 == 0) {
      view.segments_ = view.word(bytes.size() - 4);
      if (view.segments_ <= bytes.size() / 4 - 1) {
        view.table_ = bytes.size() - 4 - 4 * uint64_t{view.segments_};
        uint64_t ids = 0;
        for (uint32_t i = 0; i < view.segments_; ++i) {
          const Segment s = view.segment(i);
          ids += uint64_t{s.length} + (s.next ? 1 : 0);
        }
        if (ids <= kMostUnit) size = unit_bytes(ids, width, view.segments_);
      }
    }
    return of(bytes.size() < size ? bytes : bytes.last(size), width);
  }

  uint32_t segments() const noexcept { return segments_; }
  uint64_t tokens() const noexcept { return tokens_; }  // without those that are only labels
  Segment segment(uint32_t i) const noexcept {
    const uint32_t w = word(table_ + 4 * uint64_t{i});
    return {w / 2, w % 2 != 0};
  }
  const std::byte* ids() const noexcept { return record_.data(); }
  uint64_t bytes() const noexcept { return record_.size(); }
  // Whether both have the same segments.
  bool divided_as(const UnitView& other) const noexcept {
    return segments_ == other.segments_ &&
           std::memcmp(record_.data() + table_, other.record_.data() + other.table_,
                       4 * size_t{segments_}) == 0;
  }

 private:
  uint32_t word(uint64_t at) const noexcept {
    uint32_t value;
    std::memcpy(&value, record_.data() + at, sizeof value);
    return value;
  }
  std::span<const std::byte> record_;
  uint64_t table_ = 0, tokens_ = 0;
  uint32_t segments_ = 0;
};

}  // namespace nostall::source
