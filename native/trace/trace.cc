// The rings of all threads and the background thread that empties them into a Writer.
//
// A ring has one writer, its thread, and one reader, the background thread; two counters that only
// grow say how many events were written and read. A thread registers its ring at its first event.
// Rings of threads that have ended are kept until they are empty. A forked child has the rings but
// not the background thread: it begins with a registry of its own and records nothing.
#include "trace/trace.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <new>
#include <stop_token>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/mutex.h"
#include "trace/writer.h"

namespace nostall::trace {
namespace detail {
std::atomic<bool> recording{false};
}

namespace {

constexpr std::chrono::seconds kFlush{1};

struct Stored {
  int64_t begin, end;
  Values values;
  uint16_t kind;
};

// Written by its thread, read by the background thread.
struct Ring {
  std::vector<Stored> events = std::vector<Stored>(kRingEvents);
  std::atomic<uint64_t> head{0}, tail{0}, dropped{0};
  std::atomic<bool> ended{false};                         // its thread
  pid_t tid = static_cast<pid_t>(::syscall(SYS_gettid));  // glibc before 2.30 has no gettid
  std::string name;
  bool announced = false;  // in the file; the background thread's
};

struct KindName {
  std::string category, name;
  std::vector<std::string> arguments;
};

// The background thread and its file.
class Recorder {
 public:
  explicit Recorder(const Config& config);
  ~Recorder() { stop_.request_stop(); }
  Summary finish();

 private:
  void loop(std::stop_token stop);
  void drain();
  static void end_with(const char* why) noexcept;
  const KindText* text_of(uint16_t kind);  // null: no such kind

  const std::chrono::milliseconds period_;
  Writer writer_;
  std::vector<KindText> texts_;
  Summary summary_;
  bool failed_ = false;
  Mutex mutex_;
  StopCondition wake_;
  std::stop_source stop_;
  std::jthread thread_;
};

struct Registry {
  Mutex mutex;  // forks hold it
  std::vector<std::shared_ptr<Ring>> rings NOSTALL_GUARDED_BY(mutex);
  std::vector<KindName> kinds NOSTALL_GUARDED_BY(mutex);
  Mutex lifecycle;  // of start and stop
  std::unique_ptr<Recorder> recorder NOSTALL_GUARDED_BY(lifecycle);
};

struct Handle {
  std::shared_ptr<Ring> ring;
  ~Handle() {
    if (ring) ring->ended.store(true, std::memory_order_release);
  }
};
thread_local Handle handle;

void before_fork() noexcept;
void after_fork() noexcept;
void in_child() noexcept;

// Never destroyed: threads may outlive the statics.
Registry*& current() {
  static Registry* one = [] {
    pthread_atfork(before_fork, after_fork, in_child);
    return std::make_unique<Registry>().release();
  }();
  return one;
}
Registry& registry() { return *current(); }

void before_fork() noexcept NOSTALL_UNCHECKED { registry().mutex.lock(); }
void after_fork() noexcept NOSTALL_UNCHECKED { registry().mutex.unlock(); }

// The file, its thread and the rings are the parent's, and threads that are not in the child may have
// begun or ended a recording just then. The child leaves all of that alone but the kinds, whose
// numbers its code has.
void in_child() noexcept NOSTALL_UNCHECKED {
  detail::recording.store(false, std::memory_order_relaxed);
  Registry* const of_parent = current();
  Registry* const own = new (std::nothrow) Registry;
  if (!own) return of_parent->mutex.unlock();
  own->kinds = std::move(of_parent->kinds);
  of_parent->mutex.unlock();
  current() = own;
  handle.ring.reset();
}

Ring* ring_of_this_thread() noexcept {
  if (!handle.ring) {
    try {
      auto made = std::make_shared<Ring>();
      char name[16] = "";
      pthread_getname_np(pthread_self(), name, sizeof name);
      made->name = ::getpid() == made->tid ? "main" : name;
      Registry& all = registry();
      const MutexLock lock(all.mutex);
      all.rings.push_back(made);
      handle.ring = std::move(made);
    } catch (...) {
      return nullptr;  // no memory: this thread is not recorded
    }
  }
  return handle.ring.get();
}

Recorder::Recorder(const Config& config)
    : period_(config.period), writer_(config), thread_([this] {
        pthread_setname_np(pthread_self(), "nostall-trace");
        loop(stop_.get_token());
      }) {}

const KindText* Recorder::text_of(uint16_t kind) {
  if (kind >= texts_.size()) {
    Registry& all = registry();
    const MutexLock lock(all.mutex);
    for (size_t i = texts_.size(); i < all.kinds.size(); ++i) {
      const KindName& k = all.kinds[i];
      texts_.push_back(kind_text(k.category, k.name, k.arguments, ::getpid()));
    }
  }
  return kind < texts_.size() ? &texts_[kind] : nullptr;
}

void Recorder::drain() {
  std::vector<std::shared_ptr<Ring>> rings;
  {
    Registry& all = registry();
    const MutexLock lock(all.mutex);
    rings = all.rings;
    std::erase_if(all.rings, [](const auto& r) {
      return r->ended.load(std::memory_order_acquire) &&
             r->tail.load(std::memory_order_relaxed) == r->head.load(std::memory_order_relaxed);
    });
  }
  for (const auto& ring : rings) {
    const uint64_t head = ring->head.load(std::memory_order_acquire);
    uint64_t tail = ring->tail.load(std::memory_order_relaxed);
    if (head != tail && !ring->announced) {
      writer_.thread(ring->tid, ring->name);
      ring->announced = true;
    }
    for (; tail != head; ++tail) {
      const Stored& e = ring->events[tail % kRingEvents];
      const KindText* const text = text_of(e.kind);
      if (!text) continue;
      writer_.event(*text, ring->tid, e.begin, e.end, e.values);
      ++summary_.events;
    }
    ring->tail.store(tail, std::memory_order_release);
    summary_.dropped += ring->dropped.exchange(0, std::memory_order_relaxed);
  }
}

void Recorder::loop(std::stop_token stop) {
  auto flushed = std::chrono::steady_clock::now();
  try {
    while (!stop.stop_requested()) {
      {
        MutexLock lock(mutex_);
        wake_.wait_for(lock, stop, period_, [] { return false; });
      }
      drain();
      const auto now = std::chrono::steady_clock::now();
      const bool flush = now - flushed >= kFlush;
      if (flush) flushed = now;
      writer_.write(flush);
    }
  } catch (const std::exception& error) {
    failed_ = true;
    detail::recording.store(false, std::memory_order_relaxed);
    end_with(error.what());
  }
}

void Recorder::end_with(const char* why) noexcept try {
  log(LogLevel::warning, std::string(why) + "; recording ends here");
} catch (const std::exception&) {
  // No memory for the sentence.
}

Summary Recorder::finish() {
  stop_.request_stop();
  if (thread_.joinable()) thread_.join();
  if (failed_) return summary_;
  drain();
  summary_.bytes = writer_.finish(summary_.events, summary_.dropped);
  return summary_;
}

}  // namespace

Kind define(std::string_view category, std::string_view name,
            std::initializer_list<std::string_view> arguments) {
  if (arguments.size() > kArguments) {
    throw Error(ErrorKind::usage, "an event has at most " + std::to_string(kArguments) + " values");
  }
  Registry& all = registry();
  MutexLock lock(all.mutex);
  for (size_t i = 0; i < all.kinds.size(); ++i) {
    if (all.kinds[i].category == category && all.kinds[i].name == name) {
      return {static_cast<uint16_t>(i)};
    }
  }
  if (all.kinds.size() > kMaxKinds) return {kMaxKinds};
  if (all.kinds.size() == kMaxKinds) {
    all.kinds.push_back({"other", "other", {}});
    lock.unlock();  // a sink may wait for a thread that is about to define a kind
    log(LogLevel::warning,
        "a trace has at most " + std::to_string(kMaxKinds) + " kinds of events, and " +
            std::string(name) +
            " is one more: from here on new kinds are recorded as \"other\"; put "
            "numbers into values, not into names");
    return {kMaxKinds};
  }
  all.kinds.push_back({std::string(category), std::string(name),
                       std::vector<std::string>(arguments.begin(), arguments.end())});
  return {static_cast<uint16_t>(all.kinds.size() - 1)};
}

void record(Kind kind, int64_t begin, int64_t end, const Values& values) noexcept {
  if (!on()) return;
  Ring* const ring = ring_of_this_thread();
  if (!ring) return;
  const uint64_t head = ring->head.load(std::memory_order_relaxed);
  if (head - ring->tail.load(std::memory_order_acquire) == kRingEvents) {
    ring->dropped.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  ring->events[head % kRingEvents] = {begin, end, values, kind.index};
  ring->head.store(head + 1, std::memory_order_release);
}

void start(const Config& config) {
  Registry& all = registry();
  const MutexLock life(all.lifecycle);
  if (all.recorder) throw Error(ErrorKind::usage, "this process records a trace already");
  {
    const MutexLock lock(all.mutex);
    for (const auto& ring : all.rings) {  // what an earlier recording left
      ring->tail.store(ring->head.load());
      ring->announced = false;
    }
  }
  // Before the background thread is there, which may have to end the recording at once.
  detail::recording.store(true, std::memory_order_relaxed);
  try {
    all.recorder = std::make_unique<Recorder>(config);
  } catch (...) {
    detail::recording.store(false, std::memory_order_relaxed);
    throw;
  }
}

Summary stop() {
  Registry& all = registry();
  const MutexLock life(all.lifecycle);
  detail::recording.store(false, std::memory_order_relaxed);
  if (!all.recorder) return {};
  const std::unique_ptr<Recorder> ending = std::move(all.recorder);
  return ending->finish();
}

}  // namespace nostall::trace
