// The collectives of one node: a communicator for each plane.
#include <atomic>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>

#include "base/clock.h"
#include "base/mutex.h"
#include "collective/communicator.h"
#include "sync/collectives.h"

namespace nostall::sync {
namespace {

using collective::Communicator;
using collective::CommunicatorConfig;
using collective::DataType;
using collective::Op;
using collective::Reducer;

CommunicatorConfig config_for(const NodeCollectivesConfig& config, const char* plane,
                              uint64_t window, uint64_t arena) {
  CommunicatorConfig c;
  c.job = config.job + " " + plane;
  c.rank = config.rank;
  c.ranks = config.ranks;
  c.window_bytes = window;
  c.arena_bytes = arena;
  c.timeout = config.timeout;
  return c;
}

class NodeCollectives : public Collectives {
 public:
  explicit NodeCollectives(const NodeCollectivesConfig& config)
      : config_(config),
        data_(config_for(config, "data", uint64_t{64} << 20, config.arena_bytes)),
        control_(config_for(config, "control", uint64_t{1} << 20, uint64_t{1} << 20)),
        and_(Op::band, DataType::uint64),
        min_(Op::min, DataType::int64) {}

  ~NodeCollectives() override {
    {
      const MutexLock lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (helper_.joinable()) helper_.join();
  }

  uint32_t rank() const override { return config_.rank; }
  uint32_t ranks() const override { return config_.ranks; }
  void* allocate(uint64_t bytes) override { return data_.allocate(bytes); }
  void release(void* data) noexcept override { data_.release(data); }

  void allreduce(void* data, uint64_t count, DataType type) override {
    collective::CallOptions options;
    if (config_.fixed_order) options.order = collective::Order::fixed;
    data_.allreduce(data, data, count, Reducer(Op::sum, type), options);
  }

  void all_and(std::span<uint64_t> words) override {
    control_.allreduce(words.data(), words.data(), words.size(), and_);
  }
  int64_t all_min(int64_t value) override {
    control_.allreduce(&value, &value, 1, min_);
    return value;
  }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> bytes) override {
    std::vector<uint64_t> sizes(config_.ranks);
    const uint64_t mine = bytes.size();
    control_.allgather(&mine, sizes.data(), sizeof mine);
    uint64_t most = mine;
    for (const uint64_t s : sizes) most = std::max(most, s);
    std::vector<std::vector<std::byte>> out(config_.ranks);
    if (most == 0) return out;
    std::vector<std::byte> in(most), all(most * config_.ranks);
    if (!bytes.empty()) std::memcpy(in.data(), bytes.data(), bytes.size());
    control_.allgather(in.data(), all.data(), most);
    for (uint32_t r = 0; r < config_.ranks; ++r) {
      const auto begin = all.begin() + static_cast<ptrdiff_t>(r * most);
      out[r].assign(begin, begin + static_cast<ptrdiff_t>(sizes[r]));
    }
    return out;
  }
  std::vector<std::byte> broadcast(std::span<const std::byte> bytes, uint32_t root) override {
    uint64_t size = bytes.size();
    control_.broadcast(&size, sizeof size, root);
    std::vector<std::byte> out(size);
    if (rank() == root) out.assign(bytes.begin(), bytes.end());
    if (size > 0) control_.broadcast(out.data(), size, root);
    return out;
  }

  // A communicator blocks, so a thread of its own waits in it; the engine's thread only looks.
  void start_and(std::span<uint64_t> words) override {
    const MutexLock lock(mutex_);
    if (!helper_.joinable()) helper_ = std::thread([this] { help(); });
    words_ = words;
    done_.store(false, std::memory_order_relaxed);
    changed_.notify_all();
  }
  bool test() override {
    if (!done_.load(std::memory_order_acquire)) return false;
    const MutexLock lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    return true;
  }
  void end(const Error& why) noexcept override {
    data_.end(why);
    control_.end(why);
  }
  int64_t own_cpu_ns() const override { return helper_cpu_.load(std::memory_order_relaxed); }
  int64_t waited_ns() const override { return data_.stats().wait_ns + control_.stats().wait_ns; }
  void on_late(std::chrono::nanoseconds after,
               std::function<void(std::span<const uint32_t>)> callback) override {
    data_.on_late(after, callback);
    control_.on_late(after, std::move(callback));
  }

 private:
  void help() {
    MutexLock lock(mutex_);
    for (;;) {
      while (!stop_ && !words_) changed_.wait(lock);
      if (!words_) return;
      const std::span<uint64_t> words = *words_;
      lock.unlock();
      std::exception_ptr error;
      try {
        all_and(words);
      } catch (...) {
        error = std::current_exception();
      }
      helper_cpu_.store(thread_cpu_ns(), std::memory_order_relaxed);
      lock.lock();
      words_.reset();
      if (error) error_ = error;
      done_.store(true, std::memory_order_release);
    }
  }

  const NodeCollectivesConfig config_;
  Communicator data_, control_;
  const Reducer and_, min_;

  Mutex mutex_;
  Condition changed_;
  std::optional<std::span<uint64_t>> words_ NOSTALL_GUARDED_BY(mutex_);
  std::exception_ptr error_ NOSTALL_GUARDED_BY(mutex_);
  bool stop_ NOSTALL_GUARDED_BY(mutex_) = false;
  std::atomic<bool> done_{false};
  std::atomic<int64_t> helper_cpu_{0};
  std::thread helper_;
};

}  // namespace

std::unique_ptr<Collectives> make_node_collectives(const NodeCollectivesConfig& config) {
  return std::make_unique<NodeCollectives>(config);
}

}  // namespace nostall::sync
