// checkpoint/snapshot.h - a snapshot: the state of a rank, copied to memory as it will lie in the
// file.
//
// Read this room in this order: snapshot.h (tensors to memory), write.h (memory to a file),
// transfer.h (file to file, file to memory). A save copies every tensor once, into the very bytes
// of the file (header, then tensors back to back), so nothing is serialised afterwards: the file is
// the memory, block by block. A block is also the unit of checking (CRC32C) and of input and
// output.
//
// Weights do not change between two updates, so within that time a copy may be late, or not made at
// all: with Copying::lazily the writer reads blocks where they lie, and what an update is about to
// change is copied just before it (copy). A block that is being read at that moment is copied too,
// and what was read of it is thrown away: the update does not wait.
//
// The memory is allocated and touched before the first save, as page faults would cost several
// times the copy. Thread-safety: Memory is a value with one owner. Snapshot: begin, copy, finish
// and reserve belong to one thread; take, await_block, block and size may be called by others
// between begin and the next begin. A Reading that another thread has keeps the memory where it is.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/crew.h"
#include "base/error.h"
#include "base/mutex.h"

namespace nostall::checkpoint {

inline constexpr uint64_t kBlock = uint64_t{4} << 20;
// Direct input and output needs addresses, offsets and sizes that are multiples of this.
inline constexpr uint64_t kAlignment = 4096;

constexpr uint64_t padded(uint64_t size) {
  return (size + kAlignment - 1) / kAlignment * kAlignment;
}
constexpr uint64_t blocks_of(uint64_t size) { return (size + kBlock - 1) / kBlock; }

// Page-aligned anonymous memory, in huge pages where the system gives them.
class Memory {
 public:
  Memory() = default;
  // `size` is rounded up to whole blocks; touched by `threads` threads, not at all for 0 (a copy
  // from a device can touch it). Throws Error(io).
  Memory(uint64_t size, unsigned threads);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;

  std::byte* data() const noexcept { return data_; }
  uint64_t size() const noexcept { return size_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

// Memory of the caller that is to be copied; it must stay as it is from begin to the end of finish,
// or of a copy of it, and remain readable until the snapshot is written.
struct Piece {
  const std::byte* data = nullptr;
  uint64_t size = 0;
};

enum class Copying {
  at_once,        // by finish: the blocks can be written more than once
  in_background,  // by a thread from now on, the rest by finish; lazily if there is no thread
  lazily,         // by copy and finish, as far as no writer has read it by then
};

class Snapshot {
 public:
  // `threads` copy at once, the caller of finish among them; at least 1.
  explicit Snapshot(unsigned threads);
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Holds the snapshot as it is: reserve and begin throw Error(usage) meanwhile.
  class Reading {
   public:
    explicit Reading(Snapshot& snapshot) : snapshot_(snapshot) { ++snapshot_.readers_; }
    ~Reading() { --snapshot_.readers_; }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

   private:
    Snapshot& snapshot_;
  };

  // Makes room for a snapshot of `bytes`, so that begin need not. What the snapshot had may be lost.
  void reserve(uint64_t bytes);
  // Starts a new snapshot: `header`, then the pieces back to back. Returns at once.
  void begin(std::span<const std::byte> header, std::vector<Piece> pieces, Copying copying);
  // Copies the blocks that these pieces lie in, by number, unless that is done.
  void copy(std::span<const uint32_t> pieces);
  // Copies with the helpers until all is copied. Cost: one memory copy of the state, shared by the
  // threads, or of what is left of it.
  void finish();

  // Waits until the block is copied; false after `seconds`.
  bool await_block(uint64_t block, double seconds);
  // The block with zeros to a multiple of kAlignment: where it lies in the snapshot, or in
  // `scratch` (empty, or kBlock bytes of the caller's) if it was not copied and will not be any
  // more. Empty after `seconds`, or if another writer read the block and it is not copied.
  std::span<const std::byte> take(uint64_t block, std::span<std::byte> scratch, double seconds);
  // Whether a writer has read the block where it lies.
  bool was_taken(uint64_t block) const noexcept { return states_[block] == kTaken; }
  // Whether blocks may be read where they lie.
  bool is_lazy() const noexcept { return copying_ == Copying::lazily; }
  // Bytes that were copied into the snapshot since begin.
  uint64_t copied_bytes() const noexcept { return copied_bytes_; }
  uint64_t size() const noexcept { return size_; }
  uint64_t capacity() const noexcept { return memory_.size(); }
  uint64_t blocks() const noexcept { return blocks_of(size_); }
  // The bytes of a block; the last one may be shorter.
  std::span<const std::byte> block(uint64_t index) const noexcept;
  // The same with zeros to a multiple of kAlignment.
  std::span<const std::byte> padded_block(uint64_t index) const noexcept;

 private:
  enum State : uint8_t { kOpen, kClaimed, kReady, kTaken };
  void copy_blocks() noexcept;
  bool copy_unless_done(uint64_t index);
  template <typename Copy>
  void gather(uint64_t index, std::byte* to, const Copy& copy) const;
  unsigned start_helpers(unsigned count);
  void refuse_readers() const;

  unsigned threads_;
  std::atomic<unsigned> readers_{0};
  Memory memory_;
  uint64_t size_ = 0;
  std::vector<std::byte> header_;
  std::vector<Piece> pieces_;
  std::vector<uint64_t> starts_;  // offset of each piece in the snapshot
  std::atomic<uint64_t> next_{0};
  Mutex mutex_;  // a block becomes kReady under it, and is awaited
  Condition copied_;
  Copying copying_ = Copying::at_once;
  std::unique_ptr<std::atomic<uint8_t>[]> states_;  // of each block
  std::atomic<uint64_t> copied_bytes_{0};
  Crew helpers_;  // last: they end before what they use
};

// Copies past the caches, which belong to the training; any alignment.
void stream_copy(std::byte* to, const std::byte* from, uint64_t size) noexcept;

}  // namespace nostall::checkpoint
