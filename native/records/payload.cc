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

bool inside(const Window& window, uint64_t offset, uint64_t length) {
  return offset <= window.file_size() && length <= window.file_size() - offset;
}

Error wrong(const Window& window, uint64_t offset, const std::string& what) {
  if (window.error()) return *window.error();
  return Error(ErrorKind::corruption, "the record at offset " + std::to_string(offset) + " of " +
                                          window.path() + " " + what);
}

// Feature: bytes_list = 1, float_list = 2, int64_list = 3, each with repeated values of number 1.
bool first_value(Window& window, const Message::Field& feature, Payload* image, int64_t* label) {
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

Result<Payload> find_datum(Window& window, uint64_t offset, uint64_t length) {
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

Result<Payload> find_example(Window& window, uint64_t offset, uint64_t length,
                             const std::string& image, const std::string& label) {
  if (!inside(window, offset, length)) return wrong(window, offset, "is not inside the file");
  Payload p;
  bool image_found = false, label_found = label.empty();
  Message example(window, offset, offset + length);
  while (const auto features = example.next()) {
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
                                       (image_found ? "integers" : "bytes"));
  }
  return p;
}

// The opcodes that a pair of bytes and an integer is made of; anything else is refused, so nothing
// that a pickle could do is done.
Result<Payload> find_pickled(Window& window, uint64_t offset, uint64_t length) {
  if (!inside(window, offset, length)) return wrong(window, offset, "is not inside the file");
  const uint64_t end = offset + length;
  uint64_t at = offset;
  std::optional<Payload> bytes;
  std::optional<int64_t> integer;
  const auto little = [&](size_t size) -> std::optional<uint64_t> {
    if (size > end - at) return {};
    const auto b = window.get(at, size);
    if (b.empty()) return {};
    at += size;
    uint64_t value = 0;
    for (size_t i = 0; i < size; ++i) value |= uint64_t{uint8_t(b[i])} << (8 * i);
    return value;
  };
  const auto damaged = [&] { return wrong(window, offset, "is no sound pickle"); };
  const auto refused = [&](const std::string& why) {
    return Error(ErrorKind::usage,
                 "the pickle at offset " + std::to_string(offset) + " of " + window.path() +
                     " is not (bytes, int): " + why +
                     "; read it as values=\"raw\" and take it apart in a callable transform");
  };
  while (at < end) {
    const auto opcode = little(1);
    if (!opcode) return damaged();
    const char c = static_cast<char>(*opcode);
    const size_t size_bytes = c == 'C' ? 1 : c == 'B' ? 4 : c == '\x8e' ? 8 : 0;
    if (size_bytes > 0) {  // bytes
      const auto size = little(size_bytes);
      if (!size || *size > end - at) return damaged();
      if (bytes) return refused("there are several bytes objects in it");
      bytes.emplace();
      bytes->offset = at;
      bytes->length = *size;
      at += *size;
      continue;
    }
    std::optional<uint64_t> value = 0;
    std::optional<int64_t> number;
    switch (c) {
      case '\x80':  // protocol
        value = little(1);
        break;
      case '\x95':  // frame
        value = little(8);
        break;
      case 'q':  // memo by number
        value = little(1);
        break;
      case 'r':
        value = little(4);
        break;
      case 'K':
        value = little(1);
        if (value) number = static_cast<int64_t>(*value);
        break;
      case 'M':
        value = little(2);
        if (value) number = static_cast<int64_t>(*value);
        break;
      case 'J':
        value = little(4);
        if (value) number = static_cast<int32_t>(*value);
        break;
      case '\x8a': {  // a long of up to 8 bytes
        const auto size = little(1);
        if (!size || *size > 8) return damaged();
        value = *size == 0 ? std::optional<uint64_t>(0) : little(*size);
        if (value) {
          uint64_t v = *value;
          if (*size > 0 && *size < 8 && v >> (8 * *size - 1)) v |= ~uint64_t{0} << (8 * *size);
          number = static_cast<int64_t>(v);
        }
        break;
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
        break;
      case '.':
        if (!bytes) break;
        bytes->label = integer.value_or(0);
        return *bytes;
      default:
        return refused("opcode " + std::to_string(static_cast<unsigned char>(c)) +
                       " is not followed, for unpickling can run code");
    }
    if (!value) return damaged();
    if (number && integer) return refused("there are several integers in it");
    if (number) integer = number;
    if (c == '.') break;
  }
  if (bytes) return damaged();
  return Error(ErrorKind::usage, "the pickle at offset " + std::to_string(offset) + " of " +
                                     window.path() + " has no bytes in it");
}

}  // namespace nostall::records
