// image/finish.h - the last pass over an image: from levels to values in the batch.
// Thread-safety: functions of their arguments.
#pragma once

#include "image/bitmap.h"
#include "image/compile.h"
#include "image/draw.h"

namespace nostall::image {

// Writes row `y` of the finished image, mirrored as asked.
void store_row(const Pipeline::Impl& pipeline, int64_t y, const uint8_t* row, bool mirror_x,
               bool mirror_y, Buffer& line, std::byte* out);

// What RandomErasing drew, over the stored image.
void erase(const Pipeline::Impl& pipeline, const Erase& action, std::byte* out);

}  // namespace nostall::image
