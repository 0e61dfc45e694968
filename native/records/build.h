// records/build.h - the passes over a data set that make its record table, by many threads.
//
// Thread-safety: free functions; each thread gets a reader of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "records/members.h"
#include "records/payload.h"
#include "records/ranges.h"

namespace nostall::records {

// Calls work(reader, i) for every i < count from up to `threads` threads; the first exception ends
// all and is thrown here. `progress`, if given, is called from this thread with the number done.
void each_in_parallel(const Storage& storage, uint64_t count, unsigned threads,
                      const std::function<void(RangeReader&, uint64_t)>& work,
                      const std::function<void(uint64_t)>& progress = {});

// The files and links of all tar archives of a storage: one entry per member, in order.
struct TarMembers {
  std::vector<uint32_t> file;
  std::vector<uint64_t> offset, size;
  std::vector<std::string> names, contents;
  std::vector<uint8_t> kinds;  // of TarKind
};
// `keep_content` as in scan_tar. Throws the Error of the first archive that cannot be scanned.
TarMembers scan_tars(const Storage& storage, const std::string& keep_content, unsigned threads,
                     const std::function<void(uint64_t)>& progress = {});

// The records of all TFRecord files of a storage: one entry per record, in order.
struct TfRecordPlaces {
  std::vector<uint32_t> file;
  std::vector<uint64_t> offset, length;
  std::vector<uint32_t> crc;
};
// `check` as in scan_tfrecord. Throws the Error of the first file that cannot be scanned.
TfRecordPlaces scan_tfrecords(const Storage& storage, bool check, unsigned threads,
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

// Members of all records, by name.
struct MembersFound {
  std::vector<std::string> names;
  // Of each name: what all its members are, and the fewest and most numbers that one has.
  std::vector<MemberType> types;
  std::vector<uint8_t> lists;
  std::vector<uint32_t> least, most;
  // Of record 0, of record 1, ...: where each member lies in the file; where there is none, offset
  // is kNoMember.
  std::vector<uint64_t> offset, length;
};
inline constexpr uint64_t kNoMember = std::numeric_limits<uint64_t>::max();

// The members `names`, or if there are none, all that any record has, in the order in which they
// come first. Throws Error(usage) if one is of several types, or of one that is not read, and the
// Error of the first record that cannot be taken apart.
MembersFound find_all_members(const Storage& storage, std::span<const uint32_t> file,
                              std::span<const uint64_t> offset, std::span<const uint64_t> length,
                              MembersKind kind, const std::vector<std::string>& names,
                              unsigned threads, const std::function<void(uint64_t)>& progress = {});

}  // namespace nostall::records
