// stage/content.h - private to the stage: bytes of every origin are those that were read first.
#pragma once

#include <atomic>
#include <span>

#include "source/source.h"

namespace nostall::stage {

// Compares what was read with the checksums, which learn those that are not known. A sample that
// differs is read again; one that still differs has the error kWrongBytes. `warned`: whether damage on
// the way was logged.
void compare(const source::Source& source, SampleSums& sums,
             std::span<source::ReadRequest> requests, source::Reader& reader,
             std::atomic<bool>& warned);

}  // namespace nostall::stage
