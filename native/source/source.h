// source/source.h - where samples come from. Read this first.
//
// A Source is a fixed list of samples, the same in every process: their ids are 0 to size() - 1, each
// has a size in bytes and a label, and a fingerprint covers all. A Reader reads the bytes of samples,
// their records; each thread that reads has its own. A record is made of fields: locate() says where
// they lie, and the room fields what they are. folder.h has samples that are files, view.h a choice of
// the samples of other sources, and the room records samples that are ranges of a few large files.
// Thread-safety: a Source is immutable after construction, except for its checksums; a Reader belongs
// to one thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/shareable.h"
#include "base/sums.h"

namespace nostall::source {

// One sample to read. After Reader::read, `error` is 0 if all of `into` was filled; else a positive
// errno, or one of the two below. A failed read leaves the content of `into` unspecified.
struct ReadRequest {
  uint64_t sample = 0;
  std::span<std::byte> into;  // exactly sizes()[sample] bytes
  int error = 0;
  bool once = false;  // this node keeps the bytes: they are not worth a place in the page cache
  std::string why{};  // what `error` cannot say; mostly empty
};
inline constexpr int kSizeChanged = 10001;  // the file is shorter or longer than the index says
inline constexpr int kWrongBytes = 10002;   // what was read cannot be the sample: see `why`

// The bytes of one field of a sample: in its record, or in memory of the source, which columns known
// from the index need not leave. A field that the sample lacks has none and is not present.
struct FieldBytes {
  std::span<const std::byte> bytes{};
  bool present = true;
};

class Reader {
 public:
  virtual ~Reader() = default;
  // Reads all requests, in any order, and returns when every one has its bytes or its error.
  virtual void read(std::span<ReadRequest> requests) = 0;
  virtual std::string_view name() const = 0;  // "io_uring" or "pread"
};

enum class ReaderKind : uint8_t {
  automatic,  // io_uring where the kernel allows it, else pread
  pread,
  uring,
};

class Source {
 public:
  virtual ~Source() = default;
  virtual uint64_t size() const = 0;
  virtual std::span<const uint64_t> sizes() const = 0;  // bytes
  virtual std::span<const int64_t> labels() const = 0;
  virtual uint64_t total_bytes() const = 0;
  virtual uint64_t fingerprint() const = 0;
  // A hash of where the data set lies and when it was changed last, as far as that is known without
  // reading samples: the same in all processes of a machine that see the same files. Data sets of one
  // fingerprint and another stamp may be others. Other machines have the data set elsewhere.
  virtual uint64_t stamp() const { return 0; }
  // The stamp without times of directories, which a file that was added beside changes too. What is
  // shared in the memory of a machine is of one fingerprint and one of these.
  virtual uint64_t files_stamp() const { return stamp(); }
  // Whether the stamp has the times of files that hold samples, and not of directories alone: with
  // another one, any sample may have been changed.
  virtual bool stamp_covers_samples() const { return false; }
  // Whether the same stamp means the same content, as with the ETags of objects.
  virtual bool stamp_tells_content() const { return false; }
  // Whether all its reads are system calls on files of this machine: the thread that consumes batches
  // may do them too. Never where they lead to code of the user's, or may hang with a server.
  virtual bool is_local() const { return false; }
  // What to call the sample in a message: a path, and the place in it.
  virtual std::string describe(uint64_t sample) const = 0;
  // `depth`: requests that the reader may keep in flight at once.
  virtual std::unique_ptr<Reader> make_reader(ReaderKind kind, unsigned depth) const = 0;

  // How many fields a sample has: those of locate().
  virtual uint32_t fields() const { return 2; }
  // Where the fields of `sample` lie, given its record, as it was read: sets every element of `out`,
  // fields() long. Total: any bytes, of any length, give spans inside `record` or inside the source's
  // own memory, or an Error of kind corruption. Called from many threads. Two fields if a source does
  // not say otherwise: the whole record, and the label as eight bytes in the order of the machine.
  virtual Result<std::monostate> locate(uint64_t sample, std::span<const std::byte> record,
                                        std::span<FieldBytes> out) const;

  // Bytes that one Reader::read should ask for at once so that neighbours are read together; 0
  // where samples have no neighbours.
  virtual uint64_t batch_bytes() const { return 0; }
  // Samples that lie next to this one, in the order of the storage, for which reading on is cheaper
  // than coming back: appended to `out`, the sample itself left out.
  virtual void around(uint64_t sample, std::vector<uint64_t>& out) const {
    static_cast<void>(sample);
    static_cast<void>(out);
  }

  // How many samples the readers make side by side, where a user's code makes each in its own time:
  // more of them in one Reader::read wait for each other. 0 where samples are read, not made.
  virtual uint32_t made_at_once() const { return 0; }

  // What all processes of a node have alike, for one copy of it; null where it is not worth it.
  virtual Shareable* shareable() const { return nullptr; }

  // Checksums of samples that this process has: from the file where they are kept
  // (sums.h), and from loaders, which learn them. Readers do not look at them.
  SampleSums& sums() const;
  // Where they are kept, empty if nowhere, and how many the file has.
  const std::string& sums_file() const noexcept { return sums_file_; }
  // Where that of one sample is kept.
  virtual const std::string& sums_file_of(uint64_t sample) const {
    static_cast<void>(sample);
    return sums_file_;
  }
  uint64_t sums_kept() const noexcept { return sums_kept_; }
  // To be called before other threads know the source.
  void set_sums_file(const std::string& path) const { sums_file_ = path; }
  void set_sums_kept(uint64_t known) const noexcept { sums_kept_ = known; }

 private:
  virtual SampleSums make_sums() const { return SampleSums(size()); }

  mutable std::once_flag sums_made_;
  mutable SampleSums sums_;
  mutable std::string sums_file_;
  mutable std::atomic<uint64_t> sums_kept_{0};
};

// "file is shorter or longer than the index says" for kSizeChanged, the system's text for an errno.
std::string read_error_text(int error);
// The request's own reason where it has one.
std::string read_error_text(const ReadRequest& request);
// A name or key for a message: UTF-8 as it is, other bytes and controls as \xNN, long ones cut.
std::string printable(std::string_view name);

}  // namespace nostall::source
