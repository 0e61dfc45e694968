// Values whose sizes differ from sample to sample: held until their batch is complete, then put
// together in one buffer.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/limits.h"
#include "stage/run.h"

namespace nostall::stage {
namespace {
// Buffers that values share grow with what is held, so that a batch of little takes little. Values
// larger than a part of one get buffers of their own.
constexpr size_t kLeast = size_t{8} << 10, kMost = size_t{256} << 10, kPart = 4;
constexpr size_t kAligned = 16;
constexpr size_t kPage = 4096;  // the least that the system gives
}  // namespace

std::byte* Holding::take(size_t bytes) {
  const size_t whole = (std::max<size_t>(1, bytes) + kAligned - 1) / kAligned * kAligned;
  const MutexLock lock(mutex_);
  if (whole > left_) {
    const size_t shared = std::clamp<size_t>(bytes_, kLeast, kMost);
    const bool large = whole > shared / kPart;
    buffers_.push_back(pool_.take(large ? whole : shared));
    Buffer& buffer = *buffers_.back();
    bytes_ += buffer.capacity();
    if (large) return buffer.data();
    free_ = buffer.data();
    left_ = buffer.capacity();
  }
  left_ -= whole;
  return std::exchange(free_, free_ + whole);
}

uint64_t Holding::bytes() const {
  const MutexLock lock(mutex_);
  return bytes_;
}

void Holding::release() noexcept {
  const MutexLock lock(mutex_);
  buffers_.clear();
  left_ = 0;
}

void Loader::Run::complete(Task& task) {
  {
    const MutexLock lock(mutex_);
    // A batch that has an error is never handed out, and its places may be empty.
    if (task.error) {
      if (task.holding) task.holding->release();
      return;
    }
  }
  if (config_.program->mixes()) mix(task);
  if (config_.program->ragged() > 0) lay(task);
  Batch& batch = *task.batch;
  if (batch.labels_at) {
    std::memcpy(batch.buffer->data() + *batch.labels_at, batch.labels.data(),
                batch.labels.size() * sizeof(int64_t));
  }
}

void Loader::Run::mix(Task& task) {
  Batch& batch = *task.batch;
  auto mixture = config_.program->mix(batch.buffer->data(), batch.labels, config_.job.seed,
                                      batch.position.epoch, batch.position.batch, [&](size_t i) {
                                        return config_.source->describe(batch.samples[i]) +
                                               " (sample " + std::to_string(batch.samples[i]) + ")";
                                      });
  if (mixture) {
    batch.mixture = mixture.value();
    return;
  }
  const MutexLock lock(mutex_);
  task.error = mixture.error();
}

std::shared_ptr<Buffer> Loader::Run::take_tail(Task& task, uint64_t bytes) {
  const Batch& batch = *task.batch;
  const uint64_t samples = task.items.size();
  if (samples == 0) return raw_pool_->take(bytes);  // under mutex_
  const auto padding = config_.program->padding(task.ragged, samples, batch.laid);
  if (padding.bytes <= config_.staging_bytes) return batch_pool_->take(bytes);
  if (auto free = batch_pool_->take_free(bytes)) return free;
  const MutexLock lock(padding_);
  // What would end the program counts, not the reserve, which tiers give back; half of it is left to
  // others until they have.
  std::vector<MemoryLimit> limits = MemoryLimits("/dev/shm", config_.proc_directory).read();
  std::erase_if(limits, [bytes](const MemoryLimit& l) {
    return l.kind == LimitKind::shared_memory || l.rest() >= bytes + l.reserve() / 2;
  });
  if (limits.empty()) {
    auto tail = batch_pool_->take(bytes);
    // So that the next one finds it in use; threads that wait for it need no zeros.
    for (size_t at = 0; at < tail->capacity(); at += kPage) tail->data()[at] = std::byte{0};
    return tail;
  }
  const uint64_t others = batch_pool_->bytes();
  fail(task, batch.samples[padding.sample],
       Error(ErrorKind::io,
             (padding.field.empty() ? "" : "field " + padding.field + ": ") + "padded to its " +
                 padding.shape + " values, a batch of " + std::to_string(samples) + " needs " +
                 std::to_string(bytes) + " bytes, of which " + std::to_string(padding.bytes) +
                 " are zeros, and " + least(limits)->in_words() +
                 (others == 0 ? ""
                              : "; other batches of this loader have " + std::to_string(others) +
                                    " bytes: fewer threads= make fewer at a time") +
                 "; leave the sample out (nostall.Filter), give the field a size, or leave out "
                 "padded=True",
             ENOMEM));
  return nullptr;
}

void Loader::Run::lay(Task& task) {
  const fields::Program& program = *config_.program;
  Batch& batch = *task.batch;
  const uint64_t samples = task.items.size();
  uint64_t bytes = 0;
  try {
    batch.laid = program.plan_tail(task.ragged, samples, bytes);
    batch.tail = take_tail(task, bytes);
  } catch (const std::bad_alloc&) {
    if (samples == 0) throw;
    const MutexLock lock(mutex_);
    task.error = no_memory_;
  }
  if (!batch.tail) {
    task.holding->release();
    return;
  }
  program.lay_tail(task.ragged, samples, batch.laid, batch.tail->data());
  bytes = std::max<uint64_t>(batch.tail->capacity(), task.holding->bytes());
  task.holding->release();
  if (samples == 0) return;
  const MutexLock lock(mutex_);
  if (bytes <= most_ragged_) return;
  most_ragged_ = bytes;
  set_most_staged();
}

}  // namespace nostall::stage
