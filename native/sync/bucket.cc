#include "sync/bucket.h"

#include <cmath>
#include <cstring>

#include "base/error.h"
#include "sync/convert.h"

namespace nostall::sync {
namespace {

constexpr uint64_t kAlign = 64;  // bytes

}  // namespace

Bucket::Bucket(Transport& transport, std::span<const TensorSpec> specs)
    : transport_(transport), specs_(specs) {}

Bucket::~Bucket() { free(); }

void Bucket::free() noexcept {
  if (data_ && !own_) transport_.release(data_);
  own_.reset();
  data_ = nullptr;
  capacity_ = 0;
}

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
    free();
    data_ = static_cast<std::byte*>(transport_.allocate(wanted));
    if (!data_) {
      own_ = std::make_unique<std::byte[]>(wanted);
      data_ = own_.get();
    }
    capacity_ = wanted;
  }
  // Tensors are written as they come; the gaps between them must be zero on all ranks.
  const uint64_t element = collective::size_of(wire_);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const uint64_t end = offsets_[i] + specs_[tensors_[i]].count;
    const uint64_t next = i + 1 < tensors_.size() ? offsets_[i + 1] : flags_;
    std::memset(data_ + end * element, 0, (next - end) * element);
  }
}

void Bucket::take(size_t i, const void* gradient, double scale) {
  const TensorSpec& spec = specs_[tensors_[i]];
  std::byte* place = data_ + offsets_[i] * collective::size_of(wire_);
  if (gradient) {
    scale_into(place, wire_, gradient, spec.type, spec.count, scale);
  } else {
    std::memset(place, 0, spec.count * collective::size_of(wire_));
  }
  set_number(data_, wire_, flags_ + i, gradient ? 1.0 : 0.0);
}

void Bucket::give(size_t i, void* gradient) const {
  const TensorSpec& spec = specs_[tensors_[i]];
  scale_into(gradient, spec.type, data_ + offsets_[i] * collective::size_of(wire_), wire_,
             spec.count, 1.0);
}

uint32_t Bucket::contributors(size_t i) const {
  return static_cast<uint32_t>(std::lround(number_at(data_, wire_, flags_ + i)));
}

void Bucket::reduce() { transport_.allreduce(data_, count_, wire_); }

}  // namespace nostall::sync
