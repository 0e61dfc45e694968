// Storages and sources that read by functions in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "records/ranges.h"
#include "source/source.h"
#include "stage/buffer.h"

namespace nostall::bindings {

// Ranges by a function: (list of (file, offset, size)) -> list of buffers or exceptions.
std::shared_ptr<records::Storage> python_storage(std::vector<records::StorageFile> files,
                                                 nanobind::object read);

// Memory by a function: (bytes) -> a uint8 array of so many, aligned to 64.
stage::TakeMemory python_memory(nanobind::object take);

// Samples by a function: (list of ids) -> list of buffers or exceptions. For stores that only their
// own library can take apart. Samples of one `group` (rising, or empty) are read together; `stamp` is
// Source::stamp(). Throws Error(usage) if the columns do not go together.
std::shared_ptr<source::Source> python_source(std::vector<uint64_t> sizes,
                                              std::vector<int64_t> labels,
                                              std::vector<uint32_t> group, uint64_t fingerprint,
                                              nanobind::object read, nanobind::object describe,
                                              bool bounded, uint32_t made_at_once, uint64_t stamp);

}  // namespace nostall::bindings
