// records/tfrecord.h - the records of a TFRecord file: length, masked CRC32C of the length, the
// record, masked CRC32C of the record. Total: any bytes give places or an Error (io, corruption
// with record number and offset).
#pragma once

#include <cstdint>
#include <vector>

#include "records/file_window.h"

namespace nostall::records {

struct TfRecords {
  std::vector<uint64_t> offset, length;  // of the records' bytes
  std::vector<uint32_t> crc;             // CRC32C of them, as the file says
};

// `check`: read every record and compare its CRC; lengths are always checked.
Result<TfRecords> scan_tfrecord(FileWindow& window, bool check);

}  // namespace nostall::records
