// Finds image and label in a Datum, a tf.train.Example or a pickle by reading tags and lengths
// only. Protocol buffers are walked field by field, nested messages as ranges of their parent. A
// pickle is read opcode by opcode with a small allow-list; any other opcode is an error.
#include "records/payload.h"

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "records/protobuf.h"

namespace nostall::records {
namespace {

constexpr uint64_t kMostSide = 1 << 20;  // of unencoded pixels: three of them multiply in 64 bits

bool inside(const FileWindow& window, uint64_t offset, uint64_t length) {
  return offset <= window.file_size() && length <= window.file_size() - offset;
}

Error wrong(const FileWindow& window, uint64_t offset, const std::string& what) {
  if (window.error()) return *window.error();
  return Error(ErrorKind::corruption, "the record at offset " + std::to_string(offset) + " of " +
                                          window.path() + " " + what);
}

// Feature: bytes_list = 1, float_list = 2, int64_list = 3, each with repeated values of number 1.
bool first_value(FileWindow& window, const Message::Field& feature, Payload* image,
                 int64_t* label) {
  Message lists(window, feature.begin, feature.begin + feature.length);
  while (const auto list = lists.next()) {
    if (list->wire != 2) continue;
    Message values(window, list->begin, list->begin + list->length);
    while (const auto value = values.next()) {
      if (value->number != 1) continue;
      if (image && list->number == 1 && value->wire == 2) {
        image->offset = value->begin;
        image->length = value->length;
        return true;
      }
      if (label && list->number == 3 && value->wire == 0) {
        *label = static_cast<int64_t>(value->value);
        return true;
      }
      if (label && list->number == 3 && value->wire == 2) {  // packed
        const auto number = Message(window, value->begin, value->begin + value->length).varint();
        if (!number) return false;
        *label = static_cast<int64_t>(*number);
        return true;
      }
    }
    if (!values.ok()) return false;
  }
  return false;
}

}  // namespace

Result<Payload> find_datum(FileWindow& window, uint64_t offset, uint64_t length) {
  if (!inside(window, offset, length)) return wrong(window, offset, "is not inside the file");
  Payload p;
  bool data = false, encoded = false;
  std::array<uint64_t, 3> shape{};  // channels, height, width
  Message message(window, offset, offset + length);
  while (const auto f = message.next()) {
    if (f->number == 4 && f->wire == 2) {
      p.offset = f->begin;
      p.length = f->length;
      data = true;
    }
    if (f->wire != 0) continue;
    if (f->number >= 1 && f->number <= 3) shape[f->number - 1] = f->value;
    if (f->number == 5) p.label = static_cast<int32_t>(f->value);
    if (f->number == 7) encoded = f->value != 0;
  }
  if (!message.ok()) return wrong(window, offset, "is no Datum");
  if (!data) {
    return Error(ErrorKind::usage, "the Datum at offset " + std::to_string(offset) + " of " +
                                       window.path() +
                                       " has no bytes (float_data is not read): write it with "
                                       "encoded images or uint8 pixels");
  }
  if (encoded) return p;
  const bool fits =
      std::all_of(shape.begin(), shape.end(), [](uint64_t n) { return n < kMostSide; });
  if (!fits || shape[0] * shape[1] * shape[2] != p.length) {
    return wrong(window, offset,
                 "is a Datum of " + std::to_string(p.length) +
                     " bytes that is not encoded and not channels x height x "
                     "width long");
  }
  p.channels = static_cast<uint32_t>(shape[0]);
  p.height = static_cast<uint32_t>(shape[1]);
  p.width = static_cast<uint32_t>(shape[2]);
  return p;
}

Result<Payload> find_example(FileWindow& window, uint64_t offset, uint64_t length,
                             const std::string& image, const std::string& label) {
  if (!inside(window, offset, length)) return wrong(window, offset, "is not inside the file");
  Payload p;
  bool image_found = false, label_found = label.empty(), sequences = false;
  Message example(window, offset, offset + length);
  while (const auto features = example.next()) {
    sequences = sequences || (features->number == 2 && features->wire == 2);
    if (features->number != 1 || features->wire != 2) continue;
    Message map(window, features->begin, features->begin + features->length);
    while (const auto entry = map.next()) {
      if (entry->number != 1 || entry->wire != 2) continue;
      Message pair(window, entry->begin, entry->begin + entry->length);
      std::string key;
      std::optional<Message::Field> value;
      while (const auto f = pair.next()) {
        if (f->number == 1 && f->wire == 2 && f->length > 0 && f->length < 256) {
          const auto bytes = window.get(f->begin, static_cast<size_t>(f->length));
          if (bytes.empty()) return wrong(window, offset, "cannot be read");
          key.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        }
        if (f->number == 2 && f->wire == 2) value = f;
      }
      if (!pair.ok()) return wrong(window, offset, "is no tf.train.Example");
      if (!value) continue;
      if (key == image) image_found = first_value(window, *value, &p, nullptr);
      if (!label.empty() && key == label) {
        label_found = first_value(window, *value, nullptr, &p.label);
      }
      if (window.error()) return *window.error();
    }
    if (!map.ok()) return wrong(window, offset, "is no tf.train.Example");
  }
  if (!example.ok()) return wrong(window, offset, "is no tf.train.Example");
  if (!image_found || !label_found) {
    return Error(ErrorKind::usage, "the record at offset " + std::to_string(offset) + " of " +
                                       window.path() + " has no feature \"" +
                                       (image_found ? label : image) + "\" of " +
                                       (image_found ? "integers" : "bytes") +
                                       (sequences ? " in its context: it is a "
                                                    "tf.train.SequenceExample, whose feature lists "
                                                    "are not read"
                                                  : ""));
  }
  return p;
}

namespace {

// A pickle of a pair of bytes and an integer. It follows the opcodes that such a pickle is made of;
// all others are refused, so nothing that a pickle could do is done.
class Pickle {
 public:
  Pickle(FileWindow& window, uint64_t offset, uint64_t length)
      : window_(window), offset_(offset), at_(offset), end_(offset + length) {}

  Result<Payload> find() {
    while (at_ < end_) {
      const auto opcode = little(1);
      if (!opcode) return damaged();
      const char c = static_cast<char>(*opcode);
      const size_t size_bytes = c == 'C' ? 1 : c == 'B' ? 4 : c == '\x8e' ? 8 : 0;
      if (c == '.' && bytes_) {
        bytes_->label = integer_.value_or(0);
        return *bytes_;
      }
      if (c == '.') break;
      if (auto error = size_bytes > 0 ? take_bytes(size_bytes) : take(c)) return *error;
    }
    if (bytes_) return damaged();
    return Error(ErrorKind::usage, where() + " has no bytes in it");
  }

 private:
  std::string where() const {
    return "the pickle at offset " + std::to_string(offset_) + " of " + window_.path();
  }
  Error damaged() const { return wrong(window_, offset_, "is no sound pickle"); }
  Error refused(const std::string& why) const {
    return Error(ErrorKind::usage, where() + " is not (bytes, int): " + why +
                                       "; read it as values=\"raw\" and take it apart in a "
                                       "callable transform");
  }

  std::optional<uint64_t> little(size_t size) {
    if (size > end_ - at_) return {};
    const auto b = window_.get(at_, size);
    if (b.empty()) return {};
    at_ += size;
    uint64_t value = 0;
    for (size_t i = 0; i < size; ++i) value |= uint64_t{uint8_t(b[i])} << (8 * i);
    return value;
  }

  std::optional<Error> take_bytes(size_t size_bytes) {
    const auto size = little(size_bytes);
    if (!size || *size > end_ - at_) return damaged();
    if (bytes_) return refused("there are several bytes objects in it");
    bytes_.emplace();
    bytes_->offset = at_;
    bytes_->length = *size;
    at_ += *size;
    return {};
  }

  std::optional<Error> take_integer(std::optional<int64_t> number) {
    if (!number) return damaged();
    if (integer_) return refused("there are several integers in it");
    integer_ = number;
    return {};
  }

  // An integer of `size` bytes, at most 8, the highest one with the sign.
  std::optional<int64_t> signed_little(uint64_t size) {
    if (size == 0) return 0;
    const auto value = little(size);
    if (!value) return {};
    const uint64_t sign = size < 8 && *value >> (8 * size - 1) ? ~uint64_t{0} << (8 * size) : 0;
    return static_cast<int64_t>(*value | sign);
  }

  // Any opcode but bytes and the end.
  std::optional<Error> take(char c) {
    switch (c) {
      case '\x80':  // protocol
      case 'q':     // memo by number
        return little(1) ? std::optional<Error>() : damaged();
      case 'r':
        return little(4) ? std::optional<Error>() : damaged();
      case '\x95':  // frame
        return little(8) ? std::optional<Error>() : damaged();
      case 'K':
        return take_integer(little(1));
      case 'M':
        return take_integer(little(2));
      case 'J':
        return take_integer(signed_little(4));
      case '\x8a': {  // a long of up to 8 bytes
        const auto size = little(1);
        if (!size || *size > 8) return damaged();
        return take_integer(signed_little(*size));
      }
      case '(':     // mark
      case ')':     // empty tuple
      case ']':     // empty list
      case '\x85':  // tuples of one, two, three
      case '\x86':
      case '\x87':
      case 't':
      case 'e':
      case 'a':
      case '\x94':  // memo
        return {};
      default:
        return refused("opcode " + std::to_string(static_cast<unsigned char>(c)) +
                       " is not followed, for unpickling can run code");
    }
  }

  FileWindow& window_;
  const uint64_t offset_;
  uint64_t at_;
  const uint64_t end_;
  std::optional<Payload> bytes_;
  std::optional<int64_t> integer_;
};

}  // namespace

Result<Payload> find_pickled(FileWindow& window, uint64_t offset, uint64_t length) {
  if (!inside(window, offset, length)) return wrong(window, offset, "is not inside the file");
  return Pickle(window, offset, length).find();
}

}  // namespace nostall::records
