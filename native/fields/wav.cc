// Chunks are walked until the values are found; those that are not known are passed over.
#include "fields/wav.h"

#include <array>
#include <cstring>
#include <string>
#include <string_view>

namespace nostall::fields {
namespace {

constexpr uint32_t kMostChannels = 256;

Error damaged(const std::string& what) {
  return Error(ErrorKind::corruption, "it is no WAV file that can be read: " + what);
}

uint32_t little(std::span<const std::byte> bytes, size_t at, size_t size) {
  uint32_t value = 0;
  for (size_t i = 0; i < size; ++i) value |= std::to_integer<uint32_t>(bytes[at + i]) << (8 * i);
  return value;
}

bool is(std::span<const std::byte> bytes, size_t at, std::string_view text) {
  return std::memcmp(bytes.data() + at, text.data(), text.size()) == 0;
}

size_t width_of(Wav::Coding coding) {
  switch (coding) {
    case Wav::Coding::pcm8:
      return 1;
    case Wav::Coding::pcm16:
      return 2;
    case Wav::Coding::pcm24:
      return 3;
    case Wav::Coding::pcm32:
    case Wav::Coding::float32:
      break;
  }
  return 4;
}

using Three = std::array<std::byte, 3>;

template <typename Stored, typename To>
void convert(const std::byte* from, std::span<float> out, To to) {
  for (size_t i = 0; i < out.size(); ++i) {
    Stored value;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    out[i] = to(value);
  }
}

Result<Wav> parse_format(std::span<const std::byte> chunk) {
  if (chunk.size() < 16) return damaged("its format is cut off");
  uint32_t tag = little(chunk, 0, 2);
  const uint32_t bits = little(chunk, 14, 2);
  if (tag == 0xfffe) {  // the tag is the beginning of a GUID
    if (chunk.size() < 40) return damaged("its format is cut off");
    tag = little(chunk, 24, 2);
  }
  Wav wav;
  if (tag == 1 && bits == 8) {
    wav.coding = Wav::Coding::pcm8;
  } else if (tag == 1 && bits == 16) {
    wav.coding = Wav::Coding::pcm16;
  } else if (tag == 1 && bits == 24) {
    wav.coding = Wav::Coding::pcm24;
  } else if (tag == 1 && bits == 32) {
    wav.coding = Wav::Coding::pcm32;
  } else if (tag == 3 && bits == 32) {
    wav.coding = Wav::Coding::float32;
  } else {
    return damaged("format " + std::to_string(tag) + " of " + std::to_string(bits) +
                   " bits is neither PCM of 8, 16, 24 or 32 bits nor float32");
  }
  wav.channels = little(chunk, 2, 2);
  wav.rate = little(chunk, 4, 4);
  if (wav.channels == 0 || wav.channels > kMostChannels || wav.rate == 0) {
    return damaged(std::to_string(wav.channels) + " channels at " + std::to_string(wav.rate) +
                   " frames a second");
  }
  if (little(chunk, 12, 2) != wav.channels * width_of(wav.coding)) {
    return damaged("its frames have another size than its channels");
  }
  return wav;
}

}  // namespace

void Wav::read(uint64_t first, std::span<float> out) const noexcept {
  const std::byte* from = values.data() + first * width_of(coding);
  switch (coding) {
    case Coding::pcm8:  // the only one without a sign
      return convert<uint8_t>(
          from, out, [](uint8_t value) { return static_cast<float>(value - 128) / 128.0f; });
    case Coding::pcm16:
      return convert<int16_t>(from, out,
                              [](int16_t value) { return static_cast<float>(value) / 32768.0f; });
    case Coding::pcm24:
      return convert<Three>(from, out, [](Three value) {
        return static_cast<float>(static_cast<int32_t>(little(value, 0, 3) << 8)) / 2147483648.0f;
      });
    case Coding::pcm32:
      return convert<int32_t>(
          from, out, [](int32_t value) { return static_cast<float>(value) / 2147483648.0f; });
    case Coding::float32:
      break;
  }
  if (!out.empty()) std::memcpy(out.data(), from, out.size_bytes());
}

Result<Wav> parse_wav(std::span<const std::byte> bytes) {
  if (bytes.size() < 12 || !is(bytes, 0, "RIFF") || !is(bytes, 8, "WAVE")) {
    return damaged("its first bytes are others");
  }
  Wav wav;
  bool known = false;
  for (size_t at = 12; bytes.size() - at >= 8;) {
    const size_t size = little(bytes, at + 4, 4);
    const size_t rest = bytes.size() - at - 8;
    if (size > rest) {
      return damaged("a chunk of " + std::to_string(size) + " bytes, of which " +
                     std::to_string(rest) + " are there");
    }
    const std::span<const std::byte> chunk = bytes.subspan(at + 8, size);
    if (is(bytes, at, "fmt ")) {
      auto format = parse_format(chunk);
      if (!format) return format.error();
      wav = format.value();
      known = true;
    } else if (is(bytes, at, "data")) {
      if (!known) return damaged("its values come before their format");
      const size_t frame = wav.channels * width_of(wav.coding);
      if (size % frame != 0) return damaged("its last frame is cut off");
      wav.frames = size / frame;
      wav.values = chunk;
      return wav;
    }
    // Chunks begin at even places.
    at += 8 + size + (size % 2 != 0 && size < rest ? 1 : 0);
  }
  return damaged("it has no values");
}

}  // namespace nostall::fields
