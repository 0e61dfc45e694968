// Threads that take a snapshot's blocks, checksum them and write them.
#include "checkpoint/write.h"

#include <algorithm>

#include "base/clock.h"
#include "base/crc32c.h"
#include "checkpoint/crew.h"

namespace nostall::checkpoint {

Write::Write(std::shared_ptr<Snapshot> snapshot, std::string path, WriteOptions options,
             std::shared_ptr<Gate> gate, FileSystem& files)
    : snapshot_(std::move(snapshot)),
      path_(std::move(path)),
      options_(options),
      gate_(std::move(gate)),
      files_(files),
      pace_(options.rate),
      crcs_(snapshot_->blocks()) {}

Written Write::run() {
  const int64_t began = now_ns();
  const Snapshot::Reading reading(*snapshot_);
  output_.emplace(path_, snapshot_->size(), options_.direct, files_);
  work_lowered(lowered_, options_.priority, std::max(1u, options_.threads),
               [this] { return write_next(); });
  if (error_ != 0) throw io_error("cannot write the checkpoint's file", path_, int(-error_));
  if (lost_) {
    throw Error(ErrorKind::io, "what " + path_ +
                                   " needs was read in its window for another file that failed, "
                                   "and has changed since");
  }
  if (stopped_) throw Error(ErrorKind::stopped, "writing " + path_ + " was stopped");
  output_->finish();
  Written written;
  written.size = snapshot_->size();
  written.crcs = crcs_;
  written.direct = output_->is_direct();
  written.seconds = static_cast<double>(now_ns() - began) * 1e-9;
  written.cpu_seconds = static_cast<double>(cpu_ns_) * 1e-9;
  return written;
}

void Write::hurry() {
  hurried_ = true;
  pace_.lift();
  lowered_.raise();
}

bool Write::write_next() {
  if (stopped_ || lost_ || error_ != 0) return false;
  const uint64_t index = next_.fetch_add(1);
  if (index >= snapshot_->blocks()) return false;
  const int64_t cpu = thread_cpu_ns();
  const auto patience = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(options_.gate_patience));
  if (gate_ && !hurried_) gate_->wait_open(patience, options_.considerate);
  pace_.take(snapshot_->block(index).size());
  thread_local Memory scratch;
  if (snapshot_->is_lazy() && scratch.size() == 0) scratch = Memory(kBlock, 1);
  std::span<const std::byte> block;
  while (block.empty()) {
    block = snapshot_->take(index, {scratch.data(), scratch.size()}, 0.1);
    if (stopped_) return false;
    if (block.empty() && snapshot_->was_taken(index)) {
      lost_ = true;
      return false;
    }
  }
  crcs_[index] = crc32c(block.first(snapshot_->block(index).size()));
  const int64_t error = output_->write(block, index * kBlock);
  int64_t none = 0;
  if (error < 0) error_.compare_exchange_strong(none, error);
  cpu_ns_ += thread_cpu_ns() - cpu;
  return true;
}

}  // namespace nostall::checkpoint
