// records/payload.h - the image and the label inside a record, found without reading the image.
//
// Protocol buffers and pickles say how long their parts are, so the parts that matter are found by
// looking at a few bytes. Nothing of a pickle is executed. Total: any bytes give a payload or an
// Error (io, corruption, or usage for what the record does not have).
#pragma once

#include <cstdint>
#include <string>

#include "records/file_window.h"

namespace nostall::records {

struct Payload {
  uint64_t offset = 0, length = 0;  // of the image's bytes, in the file
  int64_t label = 0;
  // Caffe's Datum without an encoded image: channels, height, width of its uint8 pixels.
  uint32_t channels = 0, height = 0, width = 0;
  uint32_t sum = 0;  // the image's checksum (base/sums.h) where the record's CRC gives it, else 0
};

// Caffe's Datum.
Result<Payload> find_datum(FileWindow& window, uint64_t offset, uint64_t length);
// tf.train.Example: the first bytes of feature `image`, the first integer of feature `label` (not
// asked for when empty).
Result<Payload> find_example(FileWindow& window, uint64_t offset, uint64_t length,
                             const std::string& image, const std::string& label);
// A pickled pair or list (bytes, int), or bytes alone.
Result<Payload> find_pickled(FileWindow& window, uint64_t offset, uint64_t length);

}  // namespace nostall::records
