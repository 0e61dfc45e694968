// records/names.h - names of samples inside their files, for messages.
//
// The first message that needs a name scans the files again; the names are kept from then on. So a
// data set without errors spends neither time nor memory on names. If the scan fails, as it will on
// a storage that does not answer, there are no names for a while: not every message starts a scan.
// Thread-safety: any thread; a scan makes others wait. Errors: none, a name may be empty.
#pragma once

#include <memory>
#include <string>

#include "records/records.h"

namespace nostall::records {

// Member names of tar archives.
NameOf tar_names(std::shared_ptr<const Storage> storage);
// Keys of an LMDB database, while it is the one that the table was made of.
NameOf lmdb_names(std::shared_ptr<const Storage> storage, std::string database);

}  // namespace nostall::records
