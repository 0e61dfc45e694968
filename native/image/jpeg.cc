// JPEG by libjpeg-turbo: only the region wanted is transformed back from frequencies, rows below it
// are not even read. libjpeg reports errors by longjmp; every function that it may jump through
// holds nothing but trivial values, so that no destructor is skipped.
#include <setjmp.h>
#include <stdio.h>

// jpeglib.h needs stdio.h and stddef.h before it.
#include <jerror.h>
#include <jpeglib.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "image/decode.h"

namespace nostall::image {
namespace {

constexpr int kMaxScans = 500;  // a progressive image of more is an attack: each scan costs a pass
// Fancy upsampling reads one chroma sample beyond an edge: that many pixels at the edges of the
// decoded region may differ from a full decode, and are not used.
constexpr int64_t kMargin = 2;

}  // namespace

class JpegDecoder::State {
 public:
  State() {
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
    if (!create()) {
      jpeg_destroy_decompress(&jpeg_);
      throw std::bad_alloc();
    }
  }
  ~State() { jpeg_destroy_decompress(&jpeg_); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  int64_t width() const { return jpeg_.image_width; }
  int64_t height() const { return jpeg_.image_height; }

  bool read_header(std::span<const std::byte> encoded) {
    forget();
    if (setjmp(jump_) != 0) return false;
    jpeg_mem_src(&jpeg_, reinterpret_cast<const unsigned char*>(encoded.data()), encoded.size());
    jpeg_read_header(&jpeg_, TRUE);
    if (!ends_properly()) fail("the end of the image is missing: the file is truncated");
    return true;
  }

  // Chooses the region in scaled pixels; fills in `bitmap` but for its pixels.
  bool start(const Wanted& wanted, Bitmap& bitmap) {
    if (setjmp(jump_) != 0) return false;
    jpeg_.out_color_space = jpeg_.jpeg_color_space == JCS_CMYK || jpeg_.jpeg_color_space == JCS_YCCK
                                ? JCS_CMYK
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

  // Gives back the memory of the image, whether it was read to its end or not.
  void end_image() { jpeg_abort_decompress(&jpeg_); }

  bool is_cmyk() const { return jpeg_.out_color_space == JCS_CMYK; }

  Error error() const {
    if (no_memory_) throw std::bad_alloc();
    return Error(ErrorKind::corruption, std::string("JPEG: ") + message_);
  }

 private:
  static State& of(j_common_ptr jpeg) { return *static_cast<State*>(jpeg->client_data); }

  bool create() {
    if (setjmp(jump_) != 0) return false;
    jpeg_create_decompress(&jpeg_);
    jpeg_.client_data = this;
    jpeg_.progress = &progress_;
    jpeg_mem_src(&jpeg_, kNothing, sizeof kNothing);  // allocates the source for good
    allocate_ = jpeg_.mem->alloc_small;
    jpeg_.mem->alloc_small = [](j_common_ptr jpeg, int pool, size_t bytes) {
      return of(jpeg).allocate(pool, bytes);
    };
    return true;
  }

  // libjpeg keeps tables from one image to the next, and never frees them. They lie here instead.
  void* allocate(int pool, size_t bytes) {
    bytes = (bytes + alignof(max_align_t) - 1) / alignof(max_align_t) * alignof(max_align_t);
    if (pool != JPOOL_PERMANENT || bytes > sizeof tables_ - tables_used_) {
      return allocate_(reinterpret_cast<j_common_ptr>(&jpeg_), pool, bytes);
    }
    return tables_ + std::exchange(tables_used_, tables_used_ + bytes);
  }

  // An image that lacks a table must not be read with that of the image before.
  void forget() {
    std::ranges::fill(jpeg_.quant_tbl_ptrs, nullptr);
    std::ranges::fill(jpeg_.dc_huff_tbl_ptrs, nullptr);
    std::ranges::fill(jpeg_.ac_huff_tbl_ptrs, nullptr);
    tables_used_ = 0;
  }

  // Warnings after which pixels are made up. The others (bytes too many between segments, an odd
  // Adobe marker, an odd order of scans, spectral bounds of a sequential scan, a later version of
  // JFIF) leave the image whole.
  static bool damages(int warning) {
    return warning != JWRN_EXTRANEOUS_DATA && warning != JWRN_ADOBE_XFORM &&
           warning != JWRN_BOGUS_PROGRESSION && warning != JWRN_NOT_SEQUENTIAL &&
           warning != JWRN_JFIF_MAJOR;
  }

  [[noreturn]] void fail() {
    errors_.format_message(reinterpret_cast<j_common_ptr>(&jpeg_), message_);
    no_memory_ = errors_.msg_code == JERR_OUT_OF_MEMORY;
    longjmp(jump_, 1);
  }
  [[noreturn]] void fail(const char* message) {
    snprintf(message_, sizeof message_, "%s", message);
    no_memory_ = false;
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

  static constexpr unsigned char kNothing[1] = {};
  jpeg_decompress_struct jpeg_{};
  jpeg_error_mgr errors_{};
  jpeg_progress_mgr progress_{};
  jmp_buf jump_{};
  char message_[JMSG_LENGTH_MAX] = {};
  bool no_memory_ = false;  // is what the message says
  decltype(jpeg_memory_mgr::alloc_small) allocate_ = nullptr;
  alignas(max_align_t) unsigned char tables_[NUM_QUANT_TBLS * sizeof(JQUANT_TBL) +
                                             2 * NUM_HUFF_TBLS * sizeof(JHUFF_TBL) +
                                             (NUM_QUANT_TBLS + 2 * NUM_HUFF_TBLS) *
                                                 alignof(max_align_t)];
  size_t tables_used_ = 0;
};

namespace {

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

namespace {

// 8x8 grey pixels in YCbCr, with the tables of the standard.
std::vector<std::byte> smallest_image() {
  std::vector<uint8_t> jpeg{0xff, 0xd8, 0xff, 0xdb, 0, 67, 0};
  jpeg.resize(jpeg.size() + 64, 1);
  static constexpr uint8_t kRest[] = {
      0xff, 0xc0, 0, 17, 8, 0, 8, 0, 8, 3, 1, 0x11, 0,  2, 0x11, 0, 3,    0x11, 0,  // frame
      0xff, 0xda, 0, 12, 3, 1, 0, 2, 0, 3, 0, 0,    63, 0, 0x28, 3, 0xff, 0xd9};    // scan
  jpeg.insert(jpeg.end(), std::begin(kRest), std::end(kRest));
  const auto bytes = std::as_bytes(std::span(jpeg));
  return {bytes.begin(), bytes.end()};
}

}  // namespace

JpegDecoder::JpegDecoder() : state_(std::make_unique<State>()) {
  Buffer buffer;
  const std::vector<std::byte> image = smallest_image();
  // A library that has not the standard's tables refuses it when all variables are read.
  (void)decode(
      image, 64,
      [](int64_t, int64_t) {
        return Wanted{{0, 0, 8, 8}, 0};
      },
      buffer);
}
JpegDecoder::~JpegDecoder() = default;
JpegDecoder::JpegDecoder(JpegDecoder&&) noexcept = default;
JpegDecoder& JpegDecoder::operator=(JpegDecoder&&) noexcept = default;

Result<Bitmap> JpegDecoder::decode(std::span<const std::byte> encoded, uint64_t max_pixels,
                                   const Plan& plan, Buffer& buffer) {
  const std::unique_ptr<State, void (*)(State*)> image(state_.get(),
                                                       [](State* state) { state->end_image(); });
  if (!image->read_header(encoded)) return image->error();
  if (auto error = refuse_size("JPEG", image->width(), image->height(), max_pixels)) return *error;
  Bitmap bitmap;
  if (!image->start(plan(image->width(), image->height()), bitmap)) return image->error();
  uint8_t* pixels = buffer.reserve(bitmap.stride * static_cast<size_t>(bitmap.height));
  if (!image->read(bitmap, pixels)) return image->error();
  if (image->is_cmyk()) cmyk_to_rgb(pixels, static_cast<size_t>(bitmap.width * bitmap.height));
  bitmap.pixels = pixels;
  return bitmap;
}

}  // namespace nostall::image
