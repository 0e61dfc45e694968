#include "checkpoint/write.h"

#include <algorithm>
#include <thread>

#include "base/clock.h"
#include "base/crc32c.h"

namespace nostall::checkpoint {

Write::Write(std::shared_ptr<Image> image, std::string path, WriteOptions options,
             std::shared_ptr<Gate> gate, FileSystem& files)
    : image_(std::move(image)),
      path_(std::move(path)),
      options_(options),
      gate_(std::move(gate)),
      files_(files),
      pace_(options.rate),
      crcs_(image_->blocks()) {}

Written Write::run() {
  const int64_t began = now_ns();
  output_.emplace(path_, image_->size(), options_.direct, files_);
  {
    const std::lock_guard lock(running_);
    open_ = true;
  }
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, options_.threads); ++i) {
    threads.emplace_back([this] { work(options_.priority); });
  }
  for (std::thread& thread : threads) thread.join();
  {
    std::unique_lock lock(running_);
    open_ = false;
    helped_.wait(lock, [&] { return helping_ == 0; });
  }
  if (error_ != 0) throw io_error("cannot write the checkpoint's file", path_, int(-error_));
  if (stopped_) throw Error(ErrorKind::stopped, "writing " + path_ + " was stopped");
  output_->finish();
  Written written;
  written.size = image_->size();
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
  {
    const std::lock_guard lock(running_);
    if (!open_) return;
    ++helping_;
  }
  work(Priority::normal);
  const std::lock_guard lock(running_);
  --helping_;
  helped_.notify_all();
}

void Write::work(Priority priority) {
  const Lowered::Scope scope(lowered_, priority);
  const int64_t cpu = thread_cpu_ns();
  while (!stopped_ && error_ == 0) {
    const uint64_t index = next_.fetch_add(1);
    if (index >= image_->blocks()) break;
    const auto patience = std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(options_.gate_patience));
    if (gate_ && !hurried_) gate_->wait_open(patience);
    pace_.take(image_->block(index).size());
    while (!image_->await_block(index, 0.1) && !stopped_) continue;
    if (stopped_) break;
    crcs_[index] = crc32c(image_->block(index));
    const int64_t error = output_->write(image_->padded_block(index), index * kBlock);
    int64_t none = 0;
    if (error < 0) error_.compare_exchange_strong(none, error);
  }
  cpu_ns_ += thread_cpu_ns() - cpu;
}

}  // namespace nostall::checkpoint
