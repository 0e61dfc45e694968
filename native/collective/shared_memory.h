// collective/shared_memory.h - the shared memory of one communicator, as all its ranks see it.
//
//   header | one line per rank | posts | words | slot tables | two windows | channels | arenas
//
// Whatever is counted here only ever grows, stamped with the number of the step it belongs to (a
// call is one step or several): nothing is reset, so no rank can miss a reset. Memory that two
// steps might use at once exists twice, chosen by the step's parity.
//
// Life: the first rank makes a file in /dev/shm that has no name, and hands it to the others until
// all have joined (base/handover.h): the kernel frees the memory when the last process ends,
// however it ends. Where limits of the first rank (ulimit -f and -v) leave them no room, its arenas
// are smaller than ranks ask for, or empty; the others see that from its size. Each rank holds a
// kernel lock on its own byte; a rank whose lock is gone, and that did not mark itself as left, is
// dead. Ranks that are threads of one process share one mapping. A forked child does not inherit
// it. Thread-safety: the accessors are; create and the destructor belong to one thread.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/handover.h"
#include "base/lock.h"
#include "base/mapping.h"
#include "collective/atomic.h"

namespace nostall::collective {

inline constexpr uint32_t kMaxRanks = 1024;
inline constexpr uint64_t kLine = 64;
inline constexpr uint64_t kStageBytes = 64 << 10;    // a rank's posted data, per parity
inline constexpr uint64_t kChannelChunk = 32 << 10;  // between a pair of ranks
inline constexpr uint64_t kMinSlot = 4 << 10;        // of the windows

using Word = Atomic<uint64_t>;

struct alignas(kLine) PaddedWord {
  Word value;
};

// Written by its rank alone, but for `asleep`, which the waking rank clears.
struct alignas(kLine) RankLine {
  Atomic<uint32_t> asleep;  // futex word: 1 while its rank sleeps
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> left;                   // has left in order
  std::atomic<uint32_t> core;                   // where it was last seen, plus 1
  std::array<Word, 2> want_key;                 // what it sleeps for: the key of a word ...
  std::array<Word, 2> want_target;              // ... and the value from which it is to be woken
  std::array<std::atomic<int64_t>, 2> arrived;  // at the last calls of odd and even number
  // When it last began or ended to wait outside of the communicator, or progressed there; odd while
  // it waits there.
  std::atomic<int64_t> elsewhere;
};

// What a rank shows the others at a step; its data follows, in the same line if it is short.
struct alignas(kLine) Post {
  static constexpr uint64_t kInline = kLine - 16;
  Word flag;       // the step
  Word signature;  // what it calls (signature.h)
  std::array<std::byte, kInline> data;
};
static_assert(sizeof(Post) == kLine);

// Values of Header::broken.
inline constexpr uint32_t kExplained = 1, kWriter = 2;

struct Header {
  uint64_t magic;
  uint32_t version;
  uint32_t layout_bytes;
  uint32_t ranks;
  uint64_t window_bytes, arena_bytes;  // as ranks ask for them
  uint64_t selection;                  // hash of the table of algorithms
  std::atomic<uint32_t> joined;
  alignas(kLine) Atomic<uint32_t> sleepers;
  alignas(kLine) Atomic<uint32_t> broken;  // 0; kWriter + the rank that writes why; kExplained
  Word end_step;                           // from this step on calls end, once it is broken
  // Why: written before broken is kExplained.
  ErrorKind end_kind;
  int32_t end_number;
  std::array<char, 500> message;
  alignas(kLine) Word phase;            // selection.h
  std::array<PaddedWord, 2> ticket;     // step << 16 | mode << 15 | ranks that arrived
  std::array<PaddedWord, 2> ready;      // step << 24 | ranks whose shared buffers are known
  std::array<PaddedWord, 2> claim;      // step << 24 | pieces taken
  std::array<PaddedWord, 2> done;       // step << 24 | pieces finished
  std::array<PaddedWord, 2> result;     // the step whose result is there
  std::array<PaddedWord, 2> allocated;  // bytes of the window that have memory
  std::array<PaddedWord, 2> shrunk;     // the step in which it got no more
};

struct SharedMemoryConfig {
  std::string job;  // the same for all ranks of the communicator, and for no other one
  uint32_t rank = 0;
  uint32_t ranks = 1;
  uint64_t window_bytes = 0;
  uint64_t arena_bytes = 0;
  std::string directory;
  uint64_t selection = 0;
  std::string proc_directory = "/proc";  // where the limits of memory are read (base/limits.h)
};

class SharedMemory {
 public:
  // Waits for all ranks. Throws Error(peer) when they do not join or do not agree, Error(io) when
  // shared memory is full.
  SharedMemory(const SharedMemoryConfig& config, std::chrono::nanoseconds timeout);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  Header& header() const noexcept { return *reinterpret_cast<Header*>(base_); }
  RankLine& line(uint32_t rank) const noexcept { return at<RankLine>(lines_)[rank]; }
  Post& post(uint32_t rank, uint64_t step) const noexcept {
    return *at<Post>(posts_ + (rank * 2 + step % 2) * (sizeof(Post) + kStageBytes));
  }
  // Where a rank's posted `bytes` lie: with the flag if they fit there.
  std::byte* stage(uint32_t rank, uint64_t step, uint64_t bytes) const noexcept {
    Post& p = post(rank, step);
    return bytes <= Post::kInline ? p.data.data() : reinterpret_cast<std::byte*>(&p + 1);
  }
  std::byte* result(uint64_t step) const noexcept {
    return base_ + results_ + (step % 2) * kStageBytes;
  }
  Word& finished(uint32_t rank) const noexcept { return at<PaddedWord>(words_)[rank].value; }
  // Segments that the rank at a place of a chain has handed on, and that a rank has copied out.
  Word& progress(uint32_t place, uint64_t step) const noexcept {
    return at<PaddedWord>(words_)[ranks_ * (1 + step % 2) + place].value;
  }
  Word& copied(uint32_t rank, uint64_t step) const noexcept {
    return at<PaddedWord>(words_)[ranks_ * (3 + step % 2) + rank].value;
  }
  Atomic<uint32_t>* slots(uint64_t step) const noexcept {
    return at<Atomic<uint32_t>>(slots_) + (step % 2) * (window_bytes_ / kMinSlot);
  }
  std::byte* window(uint64_t step) const noexcept {
    return base_ + windows_ + (step % 2) * window_bytes_;
  }
  uint64_t window_bytes() const noexcept { return window_bytes_; }
  // Makes the first `bytes` of the step's window exist; false if shared memory is full.
  bool allocate_window(uint64_t step, uint64_t bytes) noexcept;

  // Makes a channel from or to this rank exist; throws Error(io). Both of its ranks do so before they
  // look at it: where memory is full, a look at what has none ends the process (SIGBUS).
  void allocate_channel(uint32_t from, uint32_t to);
  // Chunks sent by `from` to `to`, and received there; two chunks may be on their way.
  Word& sent(uint32_t from, uint32_t to) const noexcept {
    return at<PaddedWord>(channel(from, to))[0].value;
  }
  Word& received(uint32_t from, uint32_t to) const noexcept {
    return at<PaddedWord>(channel(from, to))[1].value;
  }
  std::byte* chunk(uint32_t from, uint32_t to, uint64_t number) const noexcept {
    return base_ + channel(from, to) + 2 * kLine + (number % 2) * kChannelChunk;
  }

  std::byte* arena(uint32_t rank) const noexcept { return base_ + arenas_ + rank * arena_bytes_; }
  uint64_t arena_bytes() const noexcept { return arena_bytes_; }
  // Memory for part of this rank's arena, or its return; throws Error(io) when there is none.
  void allocate_arena(uint64_t offset, uint64_t bytes);
  void release_arena(uint64_t offset, uint64_t bytes) noexcept;
  // The offset in this memory if all of [data, data + bytes) lies in an arena.
  std::optional<uint64_t> arena_offset(const void* data, uint64_t bytes) const noexcept;
  std::byte* at_offset(uint64_t offset) const noexcept { return base_ + offset; }
  // Whether an offset that another rank gave lies in an arena, with so many bytes from there.
  bool in_arenas(uint64_t offset, uint64_t bytes) const noexcept {
    const uint64_t all = ranks_ * arena_bytes_;
    return offset >= arenas_ && offset - arenas_ <= all && bytes <= all - (offset - arenas_);
  }

  // Names a word for the ranks that sleep on it.
  uint64_t key(const Word& word) const noexcept {
    return static_cast<uint64_t>(reinterpret_cast<const std::byte*>(&word) - base_);
  }
  // Publishes why the communicator ends for all its ranks, from `step` on; false if another error was
  // first.
  bool publish_error(const Error& error, uint64_t step) noexcept;
  // This rank does not wait for the others to join any more: publishes the error to them, and throws.
  [[noreturn]] void stop_joining(const Error& error);
  // This rank takes no further part.
  void leave() noexcept;
  // The error given to publish_error, with words before it; once header().broken is kExplained.
  Error end(const std::string& before) const;
  // Died without leaving. A system call.
  bool is_dead(uint32_t rank) const noexcept;
  bool is_forked_child() const noexcept;

 private:
  template <typename T>
  T* at(uint64_t offset) const noexcept {
    return reinterpret_cast<T*>(base_ + offset);
  }
  uint64_t channel(uint32_t from, uint32_t to) const noexcept {
    return channels_ + (uint64_t{from} * ranks_ + to) * (2 * kLine + 2 * kChannelChunk);
  }
  void lay_out();
  void set_arenas(uint64_t bytes_each) noexcept;
  // What of the arenas that are asked for limits leave room for, in bytes of a rank. Throws Error(io) if
  // they leave none for the rest.
  uint64_t possible_arena() const;
  void open(std::chrono::steady_clock::time_point deadline);
  Descriptor create();
  void check() const;
  void wait_for_all(std::chrono::steady_clock::time_point deadline,
                    std::chrono::nanoseconds timeout);
  // Makes so many bytes of the file exist, or none where they are `fresh`: this rank's alone, without
  // contents that are needed; why it cannot. Memory in no directory has no size of a file system that
  // would refuse it before a limit of memory ends the program.
  std::optional<Error> take_memory(int file, uint64_t offset, uint64_t bytes,
                                   bool fresh = true) const;

  const SharedMemoryConfig config_;
  const uint32_t ranks_;
  const uint64_t window_bytes_, wanted_arena_;
  uint64_t arena_bytes_ = 0;
  const uint32_t forks_;
  uint64_t lines_ = 0, posts_ = 0, results_ = 0, words_ = 0, slots_ = 0, windows_ = 0;
  uint64_t channels_ = 0, arenas_ = 0, total_ = 0;
  Handover handover_;
  LockFile lock_;
  std::shared_ptr<Mapping> mapping_;
  std::byte* base_ = nullptr;
  std::vector<bool> channels_there_;  // to each rank, then from each
};

}  // namespace nostall::collective
