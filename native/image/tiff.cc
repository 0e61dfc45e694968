// TIFF by libtiff, the first image of a file, always whole; where the library is missing, refused.
#include "image/decode.h"

#ifdef NOSTALL_TIFF
#include <tiffio.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace nostall::image {
namespace {

Error failed(const std::string& what) { return Error(ErrorKind::corruption, "TIFF: " + what); }

// A file in memory, and what the library says of it.
struct Memory {
  std::span<const std::byte> bytes;
  uint64_t at = 0;
  std::string complaint;
};

tmsize_t read(thandle_t handle, void* to, tmsize_t size) {
  auto& memory = *static_cast<Memory*>(handle);
  const uint64_t left = memory.at < memory.bytes.size() ? memory.bytes.size() - memory.at : 0;
  const uint64_t given = std::min(left, static_cast<uint64_t>(std::max<tmsize_t>(size, 0)));
  if (given > 0) std::memcpy(to, memory.bytes.data() + memory.at, given);
  memory.at += given;
  return static_cast<tmsize_t>(given);
}

tmsize_t refuse_write(thandle_t, void*, tmsize_t) { return 0; }

toff_t seek(thandle_t handle, toff_t to, int from) {
  auto& memory = *static_cast<Memory*>(handle);
  memory.at = to + (from == SEEK_CUR ? memory.at : from == SEEK_END ? memory.bytes.size() : 0);
  return memory.at;
}

int close(thandle_t) { return 0; }

toff_t size_of(thandle_t handle) { return static_cast<Memory*>(handle)->bytes.size(); }

int note(TIFF*, void* memory, const char* module, const char* format, va_list values) {
  char text[256];
  std::vsnprintf(text, sizeof text, format, values);
  auto& complaint = static_cast<Memory*>(memory)->complaint;
  if (complaint.empty()) complaint = std::string(module != nullptr ? module : "") + ": " + text;
  return 1;
}

int ignore(TIFF*, void*, const char*, const char*, va_list) { return 1; }

using Options = std::unique_ptr<TIFFOpenOptions, decltype(&TIFFOpenOptionsFree)>;
using Tiff = std::unique_ptr<TIFF, decltype(&TIFFClose)>;

// What PIL refuses to make RGB of, or would lose levels of.
std::optional<Error> refuse_kind(TIFF* tiff) {
  uint16_t bits = 0, format = SAMPLEFORMAT_UINT;
  TIFFGetFieldDefaulted(tiff, TIFFTAG_BITSPERSAMPLE, &bits);
  TIFFGetFieldDefaulted(tiff, TIFFTAG_SAMPLEFORMAT, &format);
  if (bits > 8 || format != SAMPLEFORMAT_UINT) {
    return failed(std::to_string(bits) +
                  " bits a value, whose levels an RGB image cannot hold: convert it to 8 bits");
  }
  return std::nullopt;
}

// Alpha is dropped, as of PNG, not multiplied into the colours.
void take_alpha_as_it_is(TIFF* tiff) {
  uint16_t count = 0, *kinds = nullptr;
  TIFFGetFieldDefaulted(tiff, TIFFTAG_EXTRASAMPLES, &count, &kinds);
  if (count == 1 && kinds[0] == EXTRASAMPLE_UNASSALPHA) {
    uint16_t plain = EXTRASAMPLE_ASSOCALPHA;
    TIFFSetField(tiff, TIFFTAG_EXTRASAMPLES, 1, &plain);
  }
}

// The library mirrors an image, but does not turn it: true if rows are to become columns. Of such a
// file the mirror that goes before is set.
bool take_turn(TIFF* tiff) {
  static constexpr std::array<uint16_t, 4> kMirrors{ORIENTATION_TOPLEFT, ORIENTATION_BOTLEFT,
                                                    ORIENTATION_BOTRIGHT, ORIENTATION_TOPRIGHT};
  uint16_t orientation = ORIENTATION_TOPLEFT;
  TIFFGetFieldDefaulted(tiff, TIFFTAG_ORIENTATION, &orientation);
  if (orientation < ORIENTATION_LEFTTOP || orientation > ORIENTATION_LEFTBOT) return false;
  TIFFSetField(tiff, TIFFTAG_ORIENTATION, kMirrors[orientation - ORIENTATION_LEFTTOP]);
  return true;
}

void turn(uint32_t* pixels, size_t width, size_t height) {
  const std::vector<uint32_t> rows(pixels, pixels + width * height);
  for (size_t y = 0; y < height; ++y) {
    for (size_t x = 0; x < width; ++x) pixels[x * height + y] = rows[y * width + x];
  }
}

}  // namespace

Result<Bitmap> decode_tiff(std::span<const std::byte> encoded, uint64_t max_pixels,
                           const Plan& plan, Buffer& buffer) {
  constexpr uint64_t kTables = 1 << 20;
  Memory memory{encoded, 0, {}};
  const Options options(TIFFOpenOptionsAlloc(), &TIFFOpenOptionsFree);
  if (!options) return failed("no memory");
  TIFFOpenOptionsSetMaxSingleMemAlloc(options.get(),
                                      static_cast<tmsize_t>(max_pixels * 4 + kTables));
  TIFFOpenOptionsSetErrorHandlerExtR(options.get(), &note, &memory);
  TIFFOpenOptionsSetWarningHandlerExtR(options.get(), &ignore, nullptr);
  const Tiff tiff(TIFFClientOpenExt("", "rm", &memory, &read, &refuse_write, &seek, &close,
                                    &size_of, nullptr, nullptr, options.get()),
                  &TIFFClose);
  if (!tiff) return failed(memory.complaint);
  uint32_t width = 0, height = 0;
  TIFFGetField(tiff.get(), TIFFTAG_IMAGEWIDTH, &width);
  TIFFGetField(tiff.get(), TIFFTAG_IMAGELENGTH, &height);
  if (auto error = refuse_size("TIFF", width, height, max_pixels)) return *error;
  if (auto error = refuse_kind(tiff.get())) return *error;
  take_alpha_as_it_is(tiff.get());
  const bool turned = take_turn(tiff.get());
  uint8_t* bytes = buffer.reserve(size_t{width} * height * 4);
  auto* pixels = reinterpret_cast<uint32_t*>(bytes);
  // The last argument: what can be read of a damaged file is not enough.
  if (TIFFReadRGBAImageOriented(tiff.get(), width, height, pixels, ORIENTATION_TOPLEFT, 1) == 0 ||
      !memory.complaint.empty()) {
    return failed(memory.complaint.empty() ? "damaged" : memory.complaint);
  }
  if (turned) {
    turn(pixels, width, height);
    std::swap(width, height);
  }
  plan(width, height);
  return Bitmap{bytes, size_t{width} * 4, 0, 0, width, height, 0};
}

}  // namespace nostall::image

#else

namespace nostall::image {

Result<Bitmap> decode_tiff(std::span<const std::byte>, uint64_t, const Plan&, Buffer&) {
  return Error(ErrorKind::corruption,
               "TIFF: this nostall was built without libtiff 4.5 or newer: convert the images, or "
               "install libtiff's headers and build it again");
}

}  // namespace nostall::image

#endif
