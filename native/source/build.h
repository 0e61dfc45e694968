// source/build.h - the passes over a data set that make its record table, by many threads.
//
// Thread-safety: free functions; each thread gets a reader of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "source/payload.h"
#include "source/ranges.h"

namespace nostall::source {

// Calls work(reader, i) for every i < count from up to `threads` threads; the first exception ends
// all and is thrown here. `progress`, if given, is called from this thread with the number done.
void each_in_parallel(const Storage& storage, uint64_t count, unsigned threads,
                      const std::function<void(RangeReader&, uint64_t)>& work,
                      const std::function<void(uint64_t)>& progress = {});

enum class PayloadKind : uint8_t { datum, pickled, example };

// The payload of every record, in order. If `crc`, the CRC32C of every record, is given, payloads
// have their checksums. Throws the Error of the first record without a payload.
std::vector<Payload> find_payloads(const Storage& storage, std::span<const uint32_t> file,
                                   std::span<const uint64_t> offset,
                                   std::span<const uint64_t> length, PayloadKind kind,
                                   const std::string& image, const std::string& label,
                                   unsigned threads,
                                   const std::function<void(uint64_t)>& progress = {},
                                   std::span<const uint32_t> crc = {});

}  // namespace nostall::source
