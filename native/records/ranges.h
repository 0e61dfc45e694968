// records/ranges.h - byte ranges of a few large files or objects, read many at a time.
//
// A Storage is a fixed list of files (a data set's shards, a database, objects behind a network); a
// RangeReader brings ranges of them, and belongs to one thread. Record stores (records.h) and the
// scanners of formats use only these two, so they work wherever ranges can be read.
// Thread-safety: Storage is immutable after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/fnv.h"
#include "source/source.h"

namespace nostall::records {

// `head.size() + into.size()` bytes from `offset` on: the first ones into `head` (often none), the
// rest into `into`. After RangeReader::read, `error` is 0 if all of both was filled, else an errno
// or kSizeChanged (the file ends before), and `why` may say more than the errno's text.
struct RangeRead {
  uint32_t file = 0;
  uint64_t offset = 0;
  std::span<std::byte> head, into;
  // The bytes will not be read again by this node: not worth a place in the page cache.
  bool once = false;
  int error = 0;
  std::string why{};

  uint64_t size() const noexcept { return head.size() + into.size(); }
};

class RangeReader {
 public:
  virtual ~RangeReader() = default;
  // Reads all, in any order, and returns when every one has its bytes or its error.
  virtual void read(std::span<RangeRead> ranges) = 0;
  virtual std::string_view name() const = 0;
  // Bytes that were asked of the storage, alignment included.
  virtual uint64_t bytes_read() const = 0;
};

struct StorageFile {
  std::string path;
  uint64_t size = 0;
  int64_t mtime_ns = 0;  // 0 where the storage has none
};

class Storage {
 public:
  virtual ~Storage() = default;
  virtual std::span<const StorageFile> files() const = 0;
  // `depth`: ranges that the reader may keep in flight at once.
  virtual std::unique_ptr<RangeReader> make_reader(source::ReaderKind kind,
                                                   unsigned depth) const = 0;
  // A hash of where the files lie and of their times: Source::stamp().
  virtual uint64_t stamp() const {
    Fnv hash;
    for (const StorageFile& f : files()) {
      hash.text(f.path).number(static_cast<uint64_t>(f.mtime_ns));
    }
    return hash.value();
  }
  // An empty string if the file is still the one that was opened, else what changed. Cheap enough
  // for one call per read.
  virtual std::string changed(uint32_t file) const = 0;
  // The file's time and size now, if nothing of what was there when it was opened need have changed:
  // it was written to or only touched, and did not shrink.
  struct Touched {
    int64_t time = 0;
    uint64_t size = 0;
    bool operator==(const Touched&) const = default;
  };
  virtual std::optional<Touched> touched(uint32_t file) const {
    static_cast<void>(file);
    return {};
  }
  // Reads a few bytes as the system has them in memory, by one call; false where that cannot be.
  virtual bool peek(uint32_t file, uint64_t offset, std::span<std::byte> into) const {
    static_cast<void>(file);
    static_cast<void>(offset);
    static_cast<void>(into);
    return false;
  }
  // Whether `mtime_ns` is another number for every other content.
  virtual bool times_tell_content() const { return false; }
  // Whether reads are system calls on files of this machine, and none leads into other code.
  virtual bool is_local() const { return false; }
};

// How local files are read past the page cache (O_DIRECT).
enum class Direct : uint8_t {
  // Reads that are needed once and are not in the page cache; and all reads if the files together
  // are larger than memory, for their pages are evicted before they are wanted again.
  automatic,
  never,
  always,  // where the file system can
};

// Files of this machine; may raise the soft limit on open files. Throws Error(io) with the path.
std::unique_ptr<Storage> open_files(const std::vector<std::string>& paths,
                                    Direct direct = Direct::automatic);

// Reads one range now; throws Error(io) with path and offset.
void read_range(RangeReader& reader, const Storage& storage, uint32_t file, uint64_t offset,
                std::span<std::byte> into);

}  // namespace nostall::records
