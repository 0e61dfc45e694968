// Any bytes give an image within the cap or an Error.
#include <cstdlib>

#include "image/pipeline.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static nostall::image::Scratch scratch;
  nostall::image::Options options;
  options.max_pixels = 1 << 18;
  const auto image = decode_rgb(std::as_bytes(std::span(data, size)), options, scratch);
  if (image && image.value().rgb.size() != size_t{image.value().height} * image.value().width * 3) {
    std::abort();
  }
  return 0;
}
