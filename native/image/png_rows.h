// image/png_rows.h - the rows of plain PNG images, decompressed at once by libdeflate.
//
// libspng decompresses row by row with zlib, which takes most of the time of an image. Almost all
// files are plain: not interlaced, chunks in order, checksums right. Those are read here; everything
// else is left to libspng, whose verdict counts. Of chunks that no pixel depends on the checksum alone
// is looked at, where libspng refuses an image for one that comes twice.
// Total: any bytes give rows or nothing. Thread-safety: an object is for one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace nostall::image {

class PngRows {
 public:
  enum Color : uint8_t { grey = 0, rgb = 2, indexed = 3, grey_alpha = 4, rgb_alpha = 6 };

  // Reads all chunks and compares their checksums; nothing unless the image is plain.
  static std::optional<PngRows> open(std::span<const std::byte> encoded) noexcept;

  uint32_t width() const { return width_; }
  uint32_t height() const { return height_; }
  unsigned bits() const { return bits_; }  // of a channel
  Color color() const { return color_; }
  unsigned channels() const;
  // Bytes of a row without its filter's number.
  size_t stride() const { return (size_t{width_} * bits_ * channels() + 7) / 8; }
  // Of an indexed image: red, green and blue of each entry.
  std::span<const std::byte> palette() const { return palette_; }

  // Bytes that inflate() needs, of an image whose size the caller has checked; 64 readable ones must follow.
  size_t scratch_size() const;
  // Decompresses the image into `scratch`, which must stay until the last row is read. False where
  // the stream is damaged or is of another length than the image.
  bool inflate(uint8_t* scratch) noexcept;
  // The rows from the top, each into `to`, which must not lie in the scratch; `above` is where the
  // row before went, null for the first one; 64 readable bytes follow it. False for a filter that
  // does not exist.
  bool next(uint8_t* to, const uint8_t* above) noexcept;

 private:
  PngRows() = default;
  bool header(std::span<const std::byte> data) noexcept;

  uint32_t width_ = 0, height_ = 0;
  unsigned bits_ = 0;
  Color color_ = grey;
  std::span<const std::byte> palette_, streams_;  // all chunks from the first IDAT to the last
  size_t compressed_ = 0;                         // bytes in these
  const uint8_t* raw_ = nullptr;                  // the next row
  const uint8_t* none_ = nullptr;                 // what is above the first row: zeros
};

}  // namespace nostall::image
