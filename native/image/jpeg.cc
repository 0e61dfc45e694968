// JPEG by libjpeg-turbo: only the region wanted is transformed back from frequencies, rows below it
// are not even read. libjpeg reports errors by longjmp; every function that it may jump through
// holds nothing but trivial values, so that no destructor is skipped.
#include <setjmp.h>
#include <stdio.h>

// jpeglib.h needs stdio.h and stddef.h before it.
#include <jerror.h>
#include <jpeglib.h>

#include <algorithm>
#include <string>

#include "image/decode.h"

namespace nostall::image {
namespace {

constexpr int kMaxScans = 500;  // a progressive image of more is an attack: each scan costs a pass
// Fancy upsampling reads one chroma sample beyond an edge: that many pixels at the edges of the
// decoded region may differ from a full decode, and are not used.
constexpr int64_t kMargin = 2;

class JpegReader {
 public:
  explicit JpegReader(std::span<const std::byte> encoded) : encoded_(encoded) {
    jpeg_.err = jpeg_std_error(&errors_);
    errors_.error_exit = [](j_common_ptr jpeg) { of(jpeg).fail(); };
    errors_.emit_message = [](j_common_ptr jpeg, int level) {
      if (level < 0 && damages(jpeg->err->msg_code)) of(jpeg).fail();
    };
    errors_.output_message = [](j_common_ptr) {};
    progress_.progress_monitor = [](j_common_ptr jpeg) {
      if (reinterpret_cast<j_decompress_ptr>(jpeg)->input_scan_number > kMaxScans) {
        of(jpeg).fail("too many scans");
      }
    };
    jpeg_.client_data = this;
  }
  ~JpegReader() { jpeg_destroy_decompress(&jpeg_); }
  JpegReader(const JpegReader&) = delete;
  JpegReader& operator=(const JpegReader&) = delete;

  int64_t width() const { return jpeg_.image_width; }
  int64_t height() const { return jpeg_.image_height; }

  bool read_header() {
    if (setjmp(jump_) != 0) return false;
    jpeg_create_decompress(&jpeg_);
    jpeg_.client_data = this;
    jpeg_.progress = &progress_;
    jpeg_mem_src(&jpeg_, reinterpret_cast<const unsigned char*>(encoded_.data()),
                 encoded_.size());
    jpeg_read_header(&jpeg_, TRUE);
    if (!ends_properly()) fail("the end of the image is missing: the file is truncated");
    return true;
  }

  // Chooses the region in scaled pixels; fills in `bitmap` but for its pixels.
  bool start(const Wanted& wanted, Bitmap& bitmap) {
    if (setjmp(jump_) != 0) return false;
    jpeg_.out_color_space =
        jpeg_.jpeg_color_space == JCS_CMYK || jpeg_.jpeg_color_space == JCS_YCCK ? JCS_CMYK
                                                                                 : JCS_EXT_RGBX;
    jpeg_.scale_num = 1;
    jpeg_.scale_denom = 1u << wanted.shrink;
    jpeg_start_decompress(&jpeg_);

    const int64_t unit = int64_t{1} << wanted.shrink;
    const int64_t left = std::max<int64_t>(0, wanted.region.x / unit - kMargin);
    const int64_t right = std::min<int64_t>(
        jpeg_.output_width, (wanted.region.x + wanted.region.width + unit - 1) / unit + kMargin);
    bitmap.y = std::max<int64_t>(0, wanted.region.y / unit - kMargin);
    const int64_t bottom = std::min<int64_t>(
        jpeg_.output_height, (wanted.region.y + wanted.region.height + unit - 1) / unit + kMargin);
    bitmap.height = bottom - bitmap.y;
    bitmap.shrink = wanted.shrink;
    if (right - left < static_cast<int64_t>(jpeg_.output_width)) {
      auto x = static_cast<JDIMENSION>(left), w = static_cast<JDIMENSION>(right - left);
      jpeg_crop_scanline(&jpeg_, &x, &w);
      bitmap.x = x;
      bitmap.width = w;
    } else {
      bitmap.x = 0;
      bitmap.width = jpeg_.output_width;
    }
    bitmap.stride = static_cast<size_t>(bitmap.width) * 4;
    return true;
  }

  bool read(const Bitmap& bitmap, uint8_t* const pixels) {
    if (setjmp(jump_) != 0) return false;
    if (bitmap.y > 0) jpeg_skip_scanlines(&jpeg_, static_cast<JDIMENSION>(bitmap.y));
    const auto bottom = static_cast<JDIMENSION>(bitmap.y + bitmap.height);
    while (jpeg_.output_scanline < bottom) {
      JSAMPROW rows[4];
      const auto first = jpeg_.output_scanline - static_cast<JDIMENSION>(bitmap.y);
      const JDIMENSION count = std::min<JDIMENSION>(4, bottom - jpeg_.output_scanline);
      for (JDIMENSION i = 0; i < count; ++i) rows[i] = pixels + (first + i) * bitmap.stride;
      jpeg_read_scanlines(&jpeg_, rows, count);
    }
    return true;
  }

  bool is_cmyk() const { return jpeg_.out_color_space == JCS_CMYK; }

  Error error() const { return Error(ErrorKind::corruption, std::string("JPEG: ") + message_); }

 private:
  static JpegReader& of(j_common_ptr jpeg) {
    return *static_cast<JpegReader*>(jpeg->client_data);
  }

  // Warnings after which pixels are made up. The others (bytes too many between segments, an odd
  // Adobe marker, an odd order of scans) leave the image whole.
  static bool damages(int warning) {
    return warning != JWRN_EXTRANEOUS_DATA && warning != JWRN_ADOBE_XFORM &&
           warning != JWRN_BOGUS_PROGRESSION;
  }

  [[noreturn]] void fail() {
    errors_.format_message(reinterpret_cast<j_common_ptr>(&jpeg_), message_);
    longjmp(jump_, 1);
  }
  [[noreturn]] void fail(const char* message) {
    snprintf(message_, sizeof message_, "%s", message);
    longjmp(jump_, 1);
  }

  // An end-of-image marker behind the first scan's header; entropy-coded data cannot contain one,
  // and a thumbnail's lies before. What follows the marker is ignored.
  bool ends_properly() const {
    const auto* scan = jpeg_.src->next_input_byte;
    for (const auto* end = scan + jpeg_.src->bytes_in_buffer; end - scan >= 2; --end) {
      if (end[-1] == 0xd9 && end[-2] == 0xff) return true;
    }
    return false;
  }

  std::span<const std::byte> encoded_;
  jpeg_decompress_struct jpeg_{};
  jpeg_error_mgr errors_{};
  jpeg_progress_mgr progress_{};
  jmp_buf jump_{};
  char message_[JMSG_LENGTH_MAX] = {};
};

// Adobe's convention, which everyone follows: values are inverted.
void cmyk_to_rgb(uint8_t* pixels, size_t count) {
  for (uint8_t* p = pixels; count > 0; --count, p += 4) {
    const unsigned k = p[3];
    for (int c = 0; c < 3; ++c) {
      const unsigned product = (255u - p[c]) * k + 128;
      p[c] = static_cast<uint8_t>(k - ((product + (product >> 8)) >> 8));
    }
  }
}

}  // namespace

Result<Bitmap> decode_jpeg(std::span<const std::byte> encoded, uint64_t max_pixels,
                           const Plan& plan, Buffer& buffer) {
  JpegReader reader(encoded);
  if (!reader.read_header()) return reader.error();
  if (auto error = refuse_size("JPEG", reader.width(), reader.height(), max_pixels)) return *error;
  Bitmap bitmap;
  if (!reader.start(plan(reader.width(), reader.height()), bitmap)) return reader.error();
  uint8_t* pixels = buffer.reserve(bitmap.stride * static_cast<size_t>(bitmap.height));
  if (!reader.read(bitmap, pixels)) return reader.error();
  if (reader.is_cmyk()) cmyk_to_rgb(pixels, static_cast<size_t>(bitmap.width * bitmap.height));
  bitmap.pixels = pixels;
  return bitmap;
}

}  // namespace nostall::image
