// records/members.h - the named values inside a record, and where each of them lies.
//
// Records that are a tf.train.Example, an uncompressed .npz file or a MessagePack map say how long
// their values are, so these are found by looking at a few bytes, and read from their places later.
// Numbers in lists are looked at one by one. Total: any bytes give members inside the record, or an
// Error (io, corruption, or usage for what is not read).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "records/file_window.h"

namespace nostall::records {

enum class MembersKind : uint8_t { example, npz, msgpack };

// What the bytes of a member are.
enum class MemberType : uint8_t {
  bytes,    // anything
  text,     // UTF-8, not checked
  npy,      // a .npy file
  floats,   // float32, one after the other
  varints,  // of protocol buffers, one after the other
  boolean,  // the others: MessagePack, one value or a list of them
  integer,  // may be a list of lists
  real,     // with integers among them
  none,     // no value: the record lacks it
  unread,   // of another type
};
std::string_view name_of(MemberType type) noexcept;

struct Member {
  std::string name;
  uint64_t offset = 0, length = 0;  // in the file
  MemberType type = MemberType::none;
  bool list = false;   // of numbers
  uint32_t count = 0;  // of numbers, in the outermost list; 1 of a number that is in none
};

// The members of the record in its own order, of these names or all; a name may come again, and the
// last one counts. Refused if they are more than kMostParts (records.h).
// Features of several byte strings, and numbers that are not packed, are unread. Of a
// tf.train.SequenceExample the context is read; it is refused if a list of features is wanted, by a
// name that its context lacks or with all. Fields of maps in maps are named by dots. Members of a
// MessagePack list are named by their numbers.
Result<std::vector<Member>> find_members(FileWindow& window, uint64_t offset, uint64_t length,
                                         MembersKind kind, std::span<const std::string> names = {});

}  // namespace nostall::records
