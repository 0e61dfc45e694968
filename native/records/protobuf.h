// records/protobuf.h - private to the room: protocol buffers walked field by field in a file.
//
// Total over untrusted bytes. Thread-safety: as of FileWindow.
#pragma once

#include <cstdint>
#include <optional>

#include "records/file_window.h"

namespace nostall::records {

// A protocol buffer message inside the file; reads its fields forward.
class Message {
 public:
  Message(FileWindow& window, uint64_t begin, uint64_t end)
      : window_(window), at_(begin), end_(end) {}

  struct Field {
    uint32_t number = 0;
    unsigned wire = 0;
    uint64_t value = 0;              // of a varint
    uint64_t begin = 0, length = 0;  // of its bytes, without tag and length
  };
  // The next field; nothing at the end, or where the bytes are no message: see ok().
  std::optional<Field> next() {
    if (at_ >= end_) return {};
    const auto tag = varint();
    if (!tag || *tag >> 3 == 0 || *tag >> 3 > 0x1fffffff) return fail();
    Field f;
    f.number = static_cast<uint32_t>(*tag >> 3);
    f.wire = static_cast<unsigned>(*tag & 7);
    if (f.wire == 0) {
      f.begin = at_;
      const auto value = varint();
      if (!value) return fail();
      f.value = *value;
      f.length = at_ - f.begin;
    } else if (f.wire == 1 || f.wire == 5) {
      const uint64_t size = f.wire == 1 ? 8 : 4;
      if (size > end_ - at_) return fail();
      f.begin = at_;
      f.length = size;
      at_ += size;
    } else if (f.wire == 2) {
      const auto size = varint();
      if (!size || *size > end_ - at_) return fail();
      f.begin = at_;
      f.length = *size;
      at_ += *size;
    } else {
      return fail();
    }
    return f;
  }
  bool ok() const { return ok_; }

  std::optional<uint64_t> varint() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      if (at_ >= end_) return {};
      const auto byte = window_.get(at_, 1);
      if (byte.empty()) return {};
      ++at_;
      value |= uint64_t{uint8_t(byte[0]) & 0x7fu} << shift;
      if ((byte[0] & std::byte{0x80}) == std::byte{0}) return value;
    }
    return {};
  }

 private:
  std::optional<Field> fail() {
    ok_ = false;
    at_ = end_;
    return {};
  }
  FileWindow& window_;
  uint64_t at_, end_;
  bool ok_ = true;
};

}  // namespace nostall::records
