// Copies pieces to blocks, by helpers, by the caller or lazily; each block is copied once.
#include "checkpoint/snapshot.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/processor.h"

namespace nostall::checkpoint {
namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;

#if defined(__x86_64__)
__attribute__((target("avx2"))) void stream_avx2(std::byte* to, const std::byte* from,
                                                 uint64_t size) noexcept {
  const uint64_t head = std::min<uint64_t>((0 - reinterpret_cast<uintptr_t>(to)) & 31u, size);
  std::memcpy(to, from, head);
  to += head, from += head, size -= head;
  for (; size >= 128; size -= 128, to += 128, from += 128) {
    const auto* in = reinterpret_cast<const __m256i*>(from);
    auto* out = reinterpret_cast<__m256i*>(to);
    const __m256i a = _mm256_loadu_si256(in), b = _mm256_loadu_si256(in + 1);
    const __m256i c = _mm256_loadu_si256(in + 2), d = _mm256_loadu_si256(in + 3);
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
    _mm256_stream_si256(out + 2, c);
    _mm256_stream_si256(out + 3, d);
  }
  _mm_sfence();
  std::memcpy(to, from, size);
}
#endif

}  // namespace

void stream_copy(std::byte* to, const std::byte* from, uint64_t size) noexcept {
  if (size == 0) return;
#if defined(__x86_64__)
  if (size >= 4096 && processor().avx2) return stream_avx2(to, from, size);
#endif
  std::memcpy(to, from, size);
}

Memory::Memory(uint64_t size, unsigned threads) : size_(blocks_of(size) * kBlock) {
  if (size_ == 0) return;
  // One huge page more than asked for, so that what is kept can begin at one.
  const uint64_t wanted = size_ + kHugePage;
  void* got = ::mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) {
    throw Error(ErrorKind::io,
                "cannot have " + std::to_string(size_) +
                    " bytes of memory for a checkpoint's snapshot: " + std::strerror(errno),
                errno);
  }
  auto* begin = static_cast<std::byte*>(got);
  const uint64_t lead = (0 - reinterpret_cast<uintptr_t>(begin)) & (kHugePage - 1);
  if (lead > 0) ::munmap(begin, lead);
  if (lead < kHugePage) ::munmap(begin + lead + size_, kHugePage - lead);
  data_ = begin + lead;
  ::madvise(data_, size_, MADV_HUGEPAGE);  // advice only
  if (threads == 0) return;
  std::atomic<uint64_t> next{0};
  const auto touch = [&]() noexcept {
    for (uint64_t at; (at = next.fetch_add(kBlock)) < size_;) {
      for (uint64_t page = 0; page < kBlock; page += kAlignment) data_[at + page] = std::byte{0};
    }
  };
  Crew helpers;
  helpers.start(threads - 1, touch);
  touch();
}

Memory::~Memory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) ::munmap(data_, size_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

Snapshot::Snapshot(unsigned threads) : threads_(std::max(1u, threads)) {}

void Snapshot::refuse_readers() const {
  if (readers_ == 0) return;
  throw Error(ErrorKind::usage, "this snapshot is being written: wait until its file is complete");
}

void Snapshot::reserve(uint64_t bytes) {
  refuse_readers();
  if (bytes <= memory_.size()) return;
  helpers_.join();
  memory_ = Memory();  // given back first: both may not fit
  memory_ = Memory(bytes, threads_);
  // A forked child (a loader's worker) has no use for a snapshot, and would make the copy fault. It
  // gets zeros, not a hole: memory of its own could take a hole's place, and end with this one.
  ::madvise(memory_.data(), memory_.size(), MADV_WIPEONFORK);
}

void Snapshot::begin(std::span<const std::byte> header, std::vector<Piece> pieces,
                     Copying copying) {
  refuse_readers();
  helpers_.join();
  std::vector<uint64_t> starts;
  starts.reserve(pieces.size() + 1);
  uint64_t size = header.size();
  for (const Piece& piece : pieces) {
    starts.push_back(size);
    size += piece.size;
  }
  size_ = 0;  // until there is memory for all of it
  reserve(padded(size));
  states_ = std::make_unique<std::atomic<uint8_t>[]>(blocks_of(size));
  header_.assign(header.begin(), header.end());
  pieces_ = std::move(pieces);
  starts_ = std::move(starts);
  size_ = size;
  std::memset(memory_.data() + size_, 0, padded(size_) - size_);
  copied_bytes_ = 0;
  copying_ = copying;
  next_ = 0;
  // Where no thread is to be had a writer reads in place: who waits for it may be who would copy.
  if (copying == Copying::in_background && start_helpers(1) == 0) copying_ = Copying::lazily;
}

unsigned Snapshot::start_helpers(unsigned count) {
  return helpers_.start(count, [this] { copy_blocks(); });
}

void Snapshot::copy(std::span<const uint32_t> pieces) {
  for (const uint32_t piece : pieces) {
    const uint64_t begin = starts_[piece], end = begin + pieces_[piece].size;
    for (uint64_t at = begin / kBlock; at * kBlock < end; ++at) {
      // A helper in the middle of it has its own processor: it is done in a moment.
      if (!copy_unless_done(at) && states_[at] == kClaimed) await_block(at, 1e9);
    }
  }
}

void Snapshot::finish() {
  const unsigned running = helpers_.size();
  if (next_ < blocks() && running + 1 < threads_) start_helpers(threads_ - 1 - running);
  copy_blocks();
  helpers_.join();
}

void Snapshot::copy_blocks() noexcept {
  for (uint64_t index; (index = next_.fetch_add(1)) < blocks();) copy_unless_done(index);
}

bool Snapshot::copy_unless_done(uint64_t index) {
  uint8_t open = kOpen;
  if (!states_[index].compare_exchange_strong(open, kClaimed)) return false;
  gather(index, memory_.data() + index * kBlock, stream_copy);
  copied_bytes_ += block(index).size();
  const MutexLock lock(mutex_);
  states_[index] = kReady;
  copied_.notify_all();
  return true;
}

template <typename Copy>
void Snapshot::gather(uint64_t index, std::byte* to, const Copy& copy) const {
  const uint64_t begin = index * kBlock, end = std::min(size_, begin + kBlock);
  const uint64_t head = std::min<uint64_t>(header_.size(), end);
  if (begin < head) std::memcpy(to, header_.data() + begin, head - begin);
  // The last piece that begins at or before the block, or the first one.
  auto at = std::upper_bound(starts_.begin(), starts_.end(), begin);
  if (at != starts_.begin()) --at;
  for (; at != starts_.end() && *at < end; ++at) {
    const Piece& piece = pieces_[static_cast<size_t>(at - starts_.begin())];
    const uint64_t from = std::max(begin, *at), until = std::min(end, *at + piece.size);
    if (from < until) copy(to + (from - begin), piece.data + (from - *at), until - from);
  }
}

bool Snapshot::await_block(uint64_t block, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  MutexLock lock(mutex_);
  while (states_[block] != kReady && copied_.wait_until(lock, end)) continue;
  return states_[block] == kReady;
}

std::span<const std::byte> Snapshot::take(uint64_t block, std::span<std::byte> scratch,
                                          double seconds) {
  if (is_lazy() && !scratch.empty() && states_[block] == kOpen) {
    gather(block, scratch.data(), std::memcpy);
    const uint64_t size = this->block(block).size();
    std::memset(scratch.data() + size, 0, padded(size) - size);
    // Copied meanwhile means updated, perhaps while it was read.
    uint8_t open = kOpen;
    if (states_[block].compare_exchange_strong(open, kTaken)) return scratch.first(padded(size));
  }
  if (states_[block] == kTaken || !await_block(block, seconds)) return {};
  return padded_block(block);
}

std::span<const std::byte> Snapshot::block(uint64_t index) const noexcept {
  const uint64_t begin = index * kBlock;
  return {memory_.data() + begin, std::min(size_ - begin, kBlock)};
}

std::span<const std::byte> Snapshot::padded_block(uint64_t index) const noexcept {
  const uint64_t begin = index * kBlock;
  return {memory_.data() + begin, std::min(padded(size_) - begin, kBlock)};
}

}  // namespace nostall::checkpoint
