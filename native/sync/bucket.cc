// A bucket's layout, copies in and out, and its memory through forks of the process.
#include "sync/bucket.h"

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "sync/convert.h"

namespace nostall::sync {
namespace {

constexpr uint64_t kAlign = 64;  // bytes

// Null where the collectives have none, or no room for more: slower is better than no step.
std::byte* allocate(Collectives& collectives, uint64_t bytes) {
  try {
    return static_cast<std::byte*>(collectives.allocate(bytes));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::io) throw;
    static std::atomic_flag warned;
    if (!warned.test_and_set()) {
      log(LogLevel::warning,
          "rank " + std::to_string(collectives.rank()) + ": " + error.what() +
              ": gradients travel from ordinary memory, which is slower; enlarge /dev/shm");
    }
    return nullptr;
  }
}

}  // namespace

BucketMemory::BucketMemory(std::shared_ptr<Collectives> collectives, uint64_t bytes)
    : collectives_(std::move(collectives)),
      data_(allocate(*collectives_, bytes)),
      owner_(::getpid()) {
  if (data_) return;
  collectives_.reset();
  heap_ = std::make_unique<std::byte[]>(bytes);
  data_ = heap_.get();
}

BucketMemory::~BucketMemory() {
  if (!collectives_) return;
  if (::getpid() == owner_) {
    collectives_->release(data_);
  } else {
    // The parent's, in the state of the moment of the fork: not to be taken down here.
    static_cast<void>(new (std::nothrow) std::shared_ptr<Collectives>(collectives_));
  }
}

Bucket::Bucket(std::shared_ptr<Collectives> collectives, std::span<const TensorSpec> specs)
    : collectives_(std::move(collectives)), specs_(specs) {}

uint64_t Bucket::bytes() const noexcept { return count_ * collective::size_of(wire_); }

void Bucket::shape(std::span<const uint32_t> tensors) {
  tensors_.assign(tensors.begin(), tensors.end());
  offsets_.clear();
  wire_ = specs_[tensors_.front()].wire;
  if (!is_floating(wire_)) {
    throw Error(ErrorKind::usage, "gradient " + specs_[tensors_.front()].name + " has type " +
                                      std::string(collective::name_of(wire_)) +
                                      ": only floating point can be reduced");
  }
  const uint64_t step = kAlign / collective::size_of(wire_);
  uint64_t at = 0;
  for (const uint32_t t : tensors_) {
    if (specs_[t].wire != wire_) {
      throw Error(ErrorKind::bug, "gradients of different types in one bucket");
    }
    offsets_.push_back(at);
    at += (specs_[t].count + step - 1) / step * step;
  }
  flags_ = at;
  count_ = at + tensors_.size();
  const uint64_t wanted = bytes();
  if (wanted > capacity_) {
    memory_.reset();
    memory_ = std::make_shared<BucketMemory>(collectives_, wanted);
    capacity_ = wanted;
    spare_.reset();
  }
  clear_gaps();
}

// Tensors are written as they are submitted; the gaps between them must be zero on all ranks.
void Bucket::clear_gaps() noexcept {
  const uint64_t element = collective::size_of(wire_);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const uint64_t end = offsets_[i] + specs_[tensors_[i]].count;
    const uint64_t next = i + 1 < tensors_.size() ? offsets_[i + 1] : flags_;
    std::memset(memory_->data() + end * element, 0, (next - end) * element);
  }
}

void Bucket::renew() {
  if (memory_.use_count() == 1) return;
  if (!spare_ || spare_.use_count() > 1) {
    spare_ = std::make_shared<BucketMemory>(collectives_, capacity_);
  }
  std::swap(memory_, spare_);
  clear_gaps();
}

std::byte* Bucket::place(size_t i) const noexcept {
  return memory_->data() + offsets_[i] * collective::size_of(wire_);
}

void Bucket::take(size_t i, const void* gradient, double scale) {
  const TensorSpec& spec = specs_[tensors_[i]];
  if (gradient) {
    scale_into(place(i), wire_, gradient, spec.type, spec.count, scale);
  } else {
    std::memset(place(i), 0, spec.count * collective::size_of(wire_));
  }
  set_number(memory_->data(), wire_, flags_ + i, gradient ? 1.0 : 0.0);
}

void Bucket::give(size_t i, void* gradient) const {
  const TensorSpec& spec = specs_[tensors_[i]];
  scale_into(gradient, spec.type, place(i), wire_, spec.count, 1.0);
}

uint32_t Bucket::contributors(size_t i) const {
  return static_cast<uint32_t>(std::lround(number_at(memory_->data(), wire_, flags_ + i)));
}

void Bucket::reduce() { collectives_->allreduce(memory_->data(), count_, wire_); }

}  // namespace nostall::sync
