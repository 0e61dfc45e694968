// records/formats.h - what the format of a table adds to reading it: names of samples for messages,
// checks of the bytes before a sample, and whether a file that was touched is still the same.
//
// Thread-safety: the functions in the options may be called from any thread.
#pragma once

#include <memory>
#include <string>

#include "records/records.h"

namespace nostall::records {

// The options for a table made from `storage`. `database`: of LMDB, the named database or empty.
// `page_size`: of an LMDB database with the page headers before its values checked, or 0.
RecordOptions options_for(const RecordTable& table, std::shared_ptr<const Storage> storage,
                          const std::string& database, uint32_t page_size);

}  // namespace nostall::records
