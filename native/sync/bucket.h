// sync/bucket.h - gradients side by side in one buffer, so that one reduction carries all of them.
//
// Layout, in elements of the wire's type: every tensor from a multiple of 64 bytes on, gaps zero,
// then one number per tensor: how many ranks had a gradient for it. Ranks that have none give zeros
// and say so; all ranks see the same counts in the sum.
// Memory: its own, or held by others too (gradients that were left in it). What others hold is
// never written again: renew() goes on in other memory.
// Thread-safety: none, but take() of different tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sync/collectives.h"
#include "sync/order.h"

namespace nostall::sync {

// From the collectives where it has such memory, which keeps it connected; else, or where that is
// full, from the heap.
// A forked child does not inherit what the collectives have mapped: it finds zeros of its own at
// these addresses, so that their holders may go on to read and write, and releases nothing.
class BucketMemory {
 public:
  BucketMemory(std::shared_ptr<Collectives> collectives, uint64_t bytes);
  ~BucketMemory();
  BucketMemory(const BucketMemory&) = delete;
  BucketMemory& operator=(const BucketMemory&) = delete;
  std::byte* data() const noexcept { return data_; }

 private:
  std::shared_ptr<Collectives> collectives_;  // null: the heap
  std::unique_ptr<std::byte[]> heap_;
  std::byte* data_;
  const int owner_;
};

class Bucket {
 public:
  // Throws Error(usage) for types that are not floating point, or differ on the wire.
  Bucket(std::shared_ptr<Collectives> collectives, std::span<const TensorSpec> specs);

  // What it holds from now on; keeps its memory where it suffices.
  void shape(std::span<const uint32_t> tensors);
  std::span<const uint32_t> tensors() const noexcept { return tensors_; }
  uint64_t bytes() const noexcept;

  // Before the first take() of a step: other memory, if someone else still holds this.
  void renew();
  std::shared_ptr<BucketMemory> memory() const noexcept { return memory_; }
  std::byte* place(size_t i) const noexcept;

  // Copies gradient i of the list in, times `scale`, in the wire's type; null: this rank has none.
  void take(size_t i, const void* gradient, double scale);
  // Copies the sum out, in the gradient's own type.
  void give(size_t i, void* gradient) const;
  // After the reduction: how many ranks had gradient i. 16-bit types count exactly up to 256.
  uint32_t contributors(size_t i) const;
  void reduce();

 private:
  void clear_gaps() noexcept;

  const std::shared_ptr<Collectives> collectives_;
  const std::span<const TensorSpec> specs_;
  std::vector<uint32_t> tensors_;
  std::vector<uint64_t> offsets_;  // elements
  uint64_t flags_ = 0, count_ = 0;
  collective::DataType wire_ = collective::DataType::float32;
  std::shared_ptr<BucketMemory> memory_, spare_;  // of the same size
  uint64_t capacity_ = 0;
};

}  // namespace nostall::sync
