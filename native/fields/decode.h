// fields/decode.h - private to the room: the value of one field, by its kind.
//
// Total: any bytes give a value or an Error of kind corruption; they may throw std::bad_alloc.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "fields/program.h"

namespace nostall::fields {

// Where a value goes: exactly as many bytes as it has, or a place to hold it.
struct Destination {
  std::span<std::byte> dense{};
  Ragged* ragged = nullptr;
  Holder* holder = nullptr;

  // The memory for a value of that shape.
  std::byte* begin(std::span<const int64_t> shape, size_t value_bytes) const;
};

// An array as it is stored: its shape, and its values wherever they lie.
struct ArrayValues {
  std::array<int64_t, kMostDims> shape{};
  std::span<const std::byte> values;
  std::vector<std::byte> converted;  // they, where they are not stored as they are
};
Result<ArrayValues> read_array(const Array& kind, std::span<const std::byte> bytes);

using Decoded = Result<std::monostate>;
// The rows of an array that go with boxes: those of the boxes that were kept.
Decoded decode_rows(const Array& kind, std::span<const std::byte> bytes, const Scratch::Rows& boxes,
                    const Destination& to);
Decoded decode(const Image& kind, const Output& output, std::span<const std::byte> bytes,
               const image::SampleKey& key, Scratch& scratch, const Destination& to);
Decoded decode(const Bytes& kind, const Output& output, std::span<const std::byte> bytes,
               const image::SampleKey& key, Scratch& scratch, const Destination& to);
Decoded decode(const Text& kind, const Output& output, std::span<const std::byte> bytes,
               const image::SampleKey& key, Scratch& scratch, const Destination& to);
Decoded decode(const Scalar& kind, const Output& output, std::span<const std::byte> bytes,
               const image::SampleKey& key, Scratch& scratch, const Destination& to);
Decoded decode(const Array& kind, const Output& output, std::span<const std::byte> bytes,
               const image::SampleKey& key, Scratch& scratch, const Destination& to);
Decoded decode(const Mask& kind, const Output& output, std::span<const std::byte> bytes,
               const image::SampleKey& key, Scratch& scratch, const Destination& to);
Decoded decode(const Audio& kind, const Output& output, std::span<const std::byte> bytes,
               const image::SampleKey& key, Scratch& scratch, const Destination& to);
Decoded decode(const Tokens& kind, const Output& output, std::span<const std::byte> bytes,
               const image::SampleKey& key, Scratch& scratch, const Destination& to);
Decoded decode(const Custom& kind, const Output& output, std::span<const std::byte> bytes,
               const image::SampleKey& key, Scratch& scratch, const Destination& to);

}  // namespace nostall::fields
