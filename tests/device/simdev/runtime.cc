// The streams, events and memory of the simulated accelerator, and its bookkeeping of faults.
#include "runtime.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace simdev {
namespace {

constexpr size_t kArena = size_t{4} << 30;
constexpr size_t kGranule = 512;

size_t page() {
  static const auto size = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

// Two mappings of one file, and the free parts of it.
class Arena {
 public:
  Arena(int seen_protection, size_t granule) : granule_(granule) {
    const int fd = ::memfd_create("simdev", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, kArena) != 0) throw std::runtime_error("simdev: no memory");
    seen_ = map(fd, seen_protection);
    reach_ = map(fd, PROT_READ | PROT_WRITE);
    ::close(fd);
    free_[0] = kArena;
  }
  bool has(const void* p) const {
    const auto* at = static_cast<const char*>(p);
    return at >= seen_ && at < seen_ + kArena;
  }
  char* reach(const void* p) const { return reach_ + (static_cast<const char*>(p) - seen_); }
  char* seen(size_t offset) const { return seen_ + offset; }
  void* take(size_t bytes) {
    bytes = rounded(bytes);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second < bytes) continue;
      const auto [offset, size] = *it;
      free_.erase(it);
      if (size > bytes) free_[offset + bytes] = size - bytes;
      return seen_ + offset;
    }
    return nullptr;
  }
  void give(void* p, size_t bytes) {
    size_t offset = static_cast<size_t>(static_cast<char*>(p) - seen_);
    bytes = rounded(bytes);
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + bytes == next->first) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    free_[offset] = bytes;
  }
  size_t rounded(size_t bytes) const {
    return (std::max<size_t>(bytes, 1) + granule_ - 1) / granule_ * granule_;
  }

 private:
  static char* map(int fd, int protection) {
    void* p = ::mmap(nullptr, kArena, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (p == MAP_FAILED) throw std::runtime_error("simdev: no address space");
    ::madvise(p, kArena, MADV_DONTFORK);
    return static_cast<char*>(p);
  }
  size_t granule_;
  char *seen_, *reach_;
  std::map<size_t, size_t> free_;
};

struct Task {
  double seconds = 0;
  double enqueued = 0;  // by the virtual clock
  std::function<void()> act;
  std::shared_ptr<Mark> waits_for, reaches;
  std::string name;
  Done done;
};

struct Stream {
  std::condition_variable wake;  // of its thread
  int device = 0;
  std::deque<Task> tasks;
  bool busy = false;
  bool held = false;
  double operation_seconds = 0;
  double bytes_per_second = 0;  // 0: no limit
  double time = 0;              // by the virtual clock, of what it has done
  Clock clock;
};

// What touched a part of memory: the timeline and its count then.
struct Touch {
  size_t timeline;
  uint64_t count;
  std::string name;
};
struct Part {
  uintptr_t end;
  std::vector<Touch> written, read;  // `written` has at most one
};

struct Guard {
  char *begin, *end;
  int protection;
  size_t timeline;
  uint64_t count;
  bool faulted;
};

// Guards are looked up in a signal handler: by a spin lock, under which no
// memory is touched that may be guarded.
struct Guards {
  std::atomic_flag lock = ATOMIC_FLAG_INIT;
  std::vector<Guard> all;
  struct {
    const char* address;
    bool copy_to_host;
  } faults[64] = {};
  size_t fault_count = 0;
  bool installed = false;
  struct sigaction before {};
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;  // for threads of the host
  Arena pinned{PROT_READ | PROT_WRITE, page()};
  std::vector<std::unique_ptr<Arena>> device;
  size_t used[kDevices] = {}, capacity[kDevices] = {kArena, kArena};
  std::vector<std::unique_ptr<Stream>> streams;
  std::map<uintptr_t, Part> parts;
  std::vector<Clock> hosts{1};  // the first: of all threads together
  bool host_by_thread = false;
  bool refuse_pinning = false;
  bool virtual_time = false;
  double host_time = 0;  // by the virtual clock
  double virtual_began = 0;
  bool guarding = true;
  uint64_t fail_after = 0;  // tasks until one fails; 0: none
  bool lost = false;        // every call fails
  std::vector<std::string> reports;
  bool logging = false;
  std::vector<Done> log;
  Guards guards;
};

std::atomic<bool> forked{false};
void on_fault(int number, siginfo_t* info, void* context);

State& state() {
  if (forked) throw std::runtime_error("simdev: it cannot be used in a forked child");
  static State* const made = [] {
    auto* s = new State;  // for as long as the process: threads use it to the end
    for (int i = 0; i < kDevices; ++i) {
      s->device.push_back(std::make_unique<Arena>(PROT_NONE, kGranule));
    }
    ::pthread_atfork(nullptr, nullptr, [] { forked = true; });
    return s;
  }();
  return *made;
}

std::unique_lock<std::mutex> locked() { return std::unique_lock(state().mutex); }

// What the host knows: all its threads together, or each by itself. A hand-over between threads is
// invisible here, so that each by itself reports too much where one thread waits for another's copy.
Clock& host_clock() {
  State& s = state();
  thread_local size_t mine = 0;
  if (s.host_by_thread && mine == 0) {
    mine = s.hosts.size();
    s.hosts.push_back(s.hosts[0]);
  }
  return s.hosts[s.host_by_thread ? mine : 0];
}
uint64_t at(const Clock& clock, size_t timeline) {
  return timeline < clock.size() ? clock[timeline] : 0;
}
void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}
uint64_t advance(Clock& clock, size_t timeline) {
  if (clock.size() <= timeline) clock.resize(timeline + 1);
  return ++clock[timeline];
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---------------------------------------------------------------------------- guards

class Spin {
 public:
  explicit Spin(Guards& guards) : guards_(guards) {
    while (guards_.lock.test_and_set(std::memory_order_acquire)) ::usleep(1);
  }
  ~Spin() { guards_.lock.clear(std::memory_order_release); }

 private:
  Guards& guards_;
};

void protect(const Guard& guard, int protection) {
  ::mprotect(guard.begin, static_cast<size_t>(guard.end - guard.begin), protection);
}

// Opens what the host has waited for, and what nothing else guards.
void release_guards(const Clock& known) {
  Guards& guards = state().guards;
  const Spin spin(guards);
  std::vector<Guard> opened;
  std::erase_if(guards.all, [&](const Guard& guard) {
    const bool over = at(known, guard.timeline) >= guard.count;
    if (over) opened.push_back(guard);
    return over;
  });
  for (const Guard& guard : opened) {
    protect(guard, PROT_READ | PROT_WRITE);
    for (const Guard& other : guards.all) {
      if (!other.faulted && other.begin < guard.end && guard.begin < other.end) {
        protect(other, other.protection);
      }
    }
  }
}

void guard(const Range& range, size_t timeline, uint64_t count) {
  State& s = state();
  if (!s.guarding || !s.pinned.has(range.begin) || range.bytes == 0) return;
  Guards& guards = s.guards;
  const Spin spin(guards);
  if (!guards.installed) {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    ::sigaction(SIGSEGV, &action, &guards.before);
    guards.installed = true;
  }
  const auto from = reinterpret_cast<uintptr_t>(range.begin) / page() * page();
  const auto to =
      (reinterpret_cast<uintptr_t>(range.begin) + range.bytes + page() - 1) / page() * page();
  guards.all.push_back({reinterpret_cast<char*>(from), reinterpret_cast<char*>(to),
                        range.write ? PROT_NONE : PROT_READ, timeline, count, false});
  protect(guards.all.back(), guards.all.back().protection);
}

// In a signal handler: no allocation, and no lock that is held while guarded memory is touched.
void on_fault(int number, siginfo_t* info, void* context) {
  Guards& guards = state().guards;
  const char* address = static_cast<const char*>(info->si_addr);
  {
    const Spin spin(guards);
    bool found = false;
    for (Guard& guard : guards.all) {
      if (guard.faulted || address < guard.begin || address >= guard.end) continue;
      guard.faulted = found = true;  // one report a copy
      protect(guard, PROT_READ | PROT_WRITE);
      if (guards.fault_count < std::size(guards.faults)) {
        guards.faults[guards.fault_count++] = {address, guard.protection == PROT_NONE};
      }
    }
    if (found) return;
  }
  // Another thread opened the pages meanwhile, or the fault is none of ours.
  if (state().pinned.has(address)) return;
  const struct sigaction& before = guards.before;
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else {
    ::signal(SIGSEGV, SIG_DFL);  // returns to the same instruction, which ends the process
  }
}

// ---------------------------------------------------------------------------- who touched what

void split(std::map<uintptr_t, Part>& parts, uintptr_t place) {
  auto it = parts.upper_bound(place);
  if (it == parts.begin()) return;
  --it;
  if (it->first == place || it->second.end <= place) return;
  Part right = it->second;
  it->second.end = place;
  parts.emplace(place, std::move(right));
}

// Reports accesses that no event orders before this one, and remembers it.
void touch(const Range& range, const Touch& mine, const Clock& clock) {
  State& s = state();
  const auto begin = reinterpret_cast<uintptr_t>(range.begin), end = begin + range.bytes;
  if (range.bytes == 0) return;
  split(s.parts, begin);
  split(s.parts, end);
  const Touch* conflict = nullptr;
  bool wrote = false;
  auto it = s.parts.lower_bound(begin);
  const auto before = [&](const Touch& other) { return at(clock, other.timeline) >= other.count; };
  for (uintptr_t place = begin; place < end;) {
    if (it == s.parts.end() || it->first > place) {
      const uintptr_t until = it == s.parts.end() ? end : std::min(end, it->first);
      it = s.parts.emplace_hint(it, place, Part{until, {}, {}});
    }
    Part& part = it->second;
    for (const Touch& other : part.written) {
      if (!conflict && !before(other)) conflict = &other, wrote = true;
    }
    if (range.write) {
      for (const Touch& other : part.read) {
        if (!conflict && !before(other)) conflict = &other;
      }
    }
    if (conflict) {
      s.reports.push_back("unordered: " + mine.name + (range.write ? " writes " : " reads ") +
                          std::to_string(range.bytes) + " bytes that " + conflict->name +
                          (wrote ? " wrote" : " read") + ", and no event orders them");
      conflict = nullptr;
      wrote = false;
      // One report a task and range.
      for (auto rest = it; rest != s.parts.end() && rest->first < end; ++rest) {
        rest->second.written.clear();
        rest->second.read.clear();
      }
    }
    if (range.write) {
      part.written.assign(1, mine);
      part.read.clear();
    } else {
      std::erase_if(part.read, [&](const Touch& o) { return o.timeline == mine.timeline; });
      part.read.push_back(mine);
    }
    place = part.end;
    ++it;
  }
}

// ---------------------------------------------------------------------------- streams

bool can_go_on(const Stream& stream) {
  return !stream.tasks.empty() && !stream.held &&
         (!stream.tasks.front().waits_for || stream.tasks.front().waits_for->done);
}

// Wakes the threads that have something to do, and no other: there may be hundreds.
void wake() {
  for (const auto& stream : state().streams) {
    if (!stream->busy && can_go_on(*stream)) stream->wake.notify_one();
  }
  state().changed.notify_all();
}

void begin(Stream& stream, const Task& task) {
  stream.time = std::max(stream.time, task.enqueued) + task.seconds;
  if (task.waits_for) stream.time = std::max(stream.time, task.waits_for->time);
}

void end(const Stream& stream, const Task& task) {
  if (!task.reaches) return;
  task.reaches->time = stream.time;
  task.reaches->seconds = state().virtual_time ? stream.time : now();
  task.reaches->done = true;
}

void serve(Stream* stream) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  for (;;) {
    stream->wake.wait(lock, [&] { return can_go_on(*stream); });
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    begin(*stream, task);
    if (task.act) {
      stream->busy = true;
      const double began = now();
      lock.unlock();
      if (task.seconds > 0 && !s.virtual_time) {
        std::this_thread::sleep_for(std::chrono::duration<double>(task.seconds));
      }
      std::string failure;
      try {
        task.act();
      } catch (const std::exception& error) {
        failure = error.what();
      }
      task.act = nullptr;  // what it holds may lock
      lock.lock();
      stream->busy = false;
      if (s.logging && !task.done.name.empty()) {
        const double end = s.virtual_time ? s.virtual_began + stream->time : now();
        const double begin = s.virtual_time ? end - task.seconds : began;
        task.done.begin = begin;
        task.done.end = end;
        s.log.push_back(std::move(task.done));
      }
      if (!failure.empty()) s.reports.push_back(task.name + " failed: " + failure);
    }
    end(*stream,
        task);  // under one lock with `busy`: a stream whose last event was waited for is idle
    wake();
  }
}

Stream& stream_of(int number) {
  State& s = state();
  while (s.streams.size() < kDevices) {
    auto* made = new Stream;
    made->device = static_cast<int>(s.streams.size());
    s.streams.emplace_back(made);
    std::thread(serve, made).detach();
  }
  return *s.streams.at(static_cast<size_t>(number));
}

void enqueue(Stream& stream, Task task) {
  task.enqueued = state().host_time;
  const bool waits = task.waits_for && !task.waits_for->done;
  if (!task.act && !waits && stream.tasks.empty() && !stream.busy && !stream.held) {
    // An event of a stream that has nothing to do, or its wait for one that is done: as on a GPU, no
    // thread of the host wakes up for it.
    begin(stream, task);
    end(stream, task);
    return;
  }
  stream.tasks.push_back(std::move(task));
  if (!stream.busy && can_go_on(stream)) stream.wake.notify_one();
}

void refuse_if_lost() {
  if (state().lost) throw std::runtime_error("simdev: device lost");
}

std::shared_ptr<Mark> mark_of(int number) {
  refuse_if_lost();
  Stream& stream = stream_of(number);
  auto mark = std::make_shared<Mark>();
  join(stream.clock, host_clock());
  mark->clock = stream.clock;
  Task task;
  task.reaches = mark;
  task.name = "event";
  enqueue(stream, std::move(task));
  return mark;
}

void learn(const Mark& mark) {
  join(host_clock(), mark.clock);
  release_guards(host_clock());
}

void await(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Mark>& mark) {
  refuse_if_lost();
  state().changed.wait(lock, [&] { return mark->done || state().lost; });
  refuse_if_lost();
  learn(*mark);
}

}  // namespace

// ---------------------------------------------------------------------------- memory

void* take_device(int device, size_t bytes) {
  const auto lock = locked();
  State& s = state();
  Arena& arena = *s.device.at(static_cast<size_t>(device));
  const size_t size = arena.rounded(bytes);
  if (s.used[device] + size > s.capacity[device]) return nullptr;
  void* p = arena.take(bytes);
  if (p) {
    s.used[device] += size;
    std::memset(arena.reach(p), 0xff, size);
  }
  return p;
}

void give_device(int device, void* address, size_t bytes) {
  const auto lock = locked();
  Arena& arena = *state().device.at(static_cast<size_t>(device));
  state().used[device] -= arena.rounded(bytes);
  arena.give(address, bytes);
}

void* take_pinned(size_t bytes) {
  const auto lock = locked();
  return state().refuse_pinning ? nullptr : state().pinned.take(bytes);
}

void give_pinned(void* address, size_t bytes) {
  const auto lock = locked();
  state().pinned.give(address, bytes);
}

int device_of(const void* address) {
  for (int i = 0; i < kDevices; ++i) {
    if (state().device[static_cast<size_t>(i)]->has(address)) return i;
  }
  return -1;
}
bool is_device(const void* address) { return device_of(address) >= 0; }
bool is_pinned(const void* address) { return state().pinned.has(address); }
size_t capacity(int device) {
  const auto lock = locked();
  return state().capacity[device];
}

void* reach(const void* address) {
  if (const int device = device_of(address); device >= 0) {
    return state().device[static_cast<size_t>(device)]->reach(address);
  }
  if (is_pinned(address)) return state().pinned.reach(address);
  return const_cast<void*>(address);
}

// ---------------------------------------------------------------------------- streams and events

int new_stream(int device) {
  const auto lock = locked();
  State& s = state();
  stream_of(0);
  auto* made = new Stream;
  made->device = device;
  made->operation_seconds = s.streams[static_cast<size_t>(device)]->operation_seconds;
  made->bytes_per_second = s.streams[static_cast<size_t>(device)]->bytes_per_second;
  s.streams.emplace_back(made);
  std::thread(serve, made).detach();
  return static_cast<int>(s.streams.size()) - 1;
}

int device_of_stream(int stream) {
  const auto lock = locked();
  return stream_of(stream).device;
}

void push(int number, const std::string& name, const std::vector<Range>& touched, size_t bytes,
          std::function<void()> act, const Range* guarded) {
  const auto lock = locked();
  State& s = state();
  Stream& stream = stream_of(number);
  refuse_if_lost();
  if (s.fail_after > 0 && --s.fail_after == 0) throw std::runtime_error("simdev: device lost");
  join(stream.clock, host_clock());
  const auto timeline = static_cast<size_t>(number);
  const uint64_t count = advance(stream.clock, timeline);
  const std::string label = name + " on stream " + std::to_string(number);
  for (const Range& range : touched) touch(range, {timeline, count, label}, stream.clock);
  if (guarded) guard(*guarded, timeline, count);
  double seconds = stream.operation_seconds;
  if (stream.bytes_per_second > 0) seconds += static_cast<double>(bytes) / stream.bytes_per_second;
  Task task;
  task.seconds = seconds;
  task.act = std::move(act);
  task.name = label;
  if (s.logging) task.done = {name, stream.device, number, bytes, 0, 0};
  enqueue(stream, std::move(task));
}

void poison(int number, void* address, size_t bytes) {
  const auto lock = locked();
  Stream& stream = stream_of(number);
  join(stream.clock, host_clock());
  Task task;
  task.act = [=] { std::memset(reach(address), 0xff, bytes); };
  task.name = "poison";
  enqueue(stream, std::move(task));
}

bool is_guarded(const void* address, size_t bytes) {
  const auto lock = locked();
  Guards& guards = state().guards;
  const Spin spin(guards);
  const auto* begin = static_cast<const char*>(address);
  return std::any_of(guards.all.begin(), guards.all.end(), [&](const Guard& guard) {
    return guard.begin < begin + bytes && begin < guard.end;
  });
}

bool query(int number) {
  const auto lock = locked();
  refuse_if_lost();
  Stream& stream = stream_of(number);
  const bool idle = stream.tasks.empty() && !stream.busy;
  if (idle) {
    join(host_clock(), stream.clock);
    release_guards(host_clock());
  }
  return idle;
}

void synchronize(int number) {
  auto lock = locked();
  await(lock, mark_of(number));
}

void synchronize_device(int device) {
  auto lock = locked();
  stream_of(0);
  std::vector<std::shared_ptr<Mark>> marks;
  for (size_t i = 0; i < state().streams.size(); ++i) {
    if (state().streams[i]->device == device) marks.push_back(mark_of(static_cast<int>(i)));
  }
  for (const auto& mark : marks) await(lock, mark);
}

void record(Event& event, int stream) {
  const auto lock = locked();
  event.mark = mark_of(stream);
}

void block(const Event& event, int number) {
  const auto lock = locked();
  refuse_if_lost();
  if (!event.mark) return;
  Stream& stream = stream_of(number);
  join(stream.clock, event.mark->clock);
  Task task;
  task.waits_for = event.mark;
  task.name = "wait";
  enqueue(stream, std::move(task));
}

bool query(const Event& event) {
  const auto lock = locked();
  refuse_if_lost();
  if (!event.mark) return true;
  if (event.mark->done) learn(*event.mark);
  return event.mark->done;
}

void synchronize(const Event& event) {
  auto lock = locked();
  if (event.mark) await(lock, event.mark);
}

double milliseconds(const Event& from, const Event& to) {
  const auto lock = locked();
  if (!from.mark || !to.mark || !from.mark->done || !to.mark->done) {
    throw std::runtime_error("simdev: elapsed_time of an event that is not done");
  }
  return (to.mark->seconds - from.mark->seconds) * 1e3;
}

bool is_forked() { return forked; }

void start_log() {
  const auto lock = locked();
  state().log.clear();
  state().logging = true;
}

std::vector<Done> stop_log() {
  const auto lock = locked();
  state().logging = false;
  return std::move(state().log);
}

void report(const std::string& what) {
  const auto lock = locked();
  state().reports.push_back(what);
}

}  // namespace simdev

// ---------------------------------------------------------------------------- for tests, by ctypes

using namespace simdev;

extern "C" {

void simdev_hold(int stream, int held) {
  const auto lock = locked();
  stream_of(stream).held = held != 0;
  wake();
}

void simdev_speed(int stream, double operation_seconds, double bytes_per_second) {
  const auto lock = locked();
  stream_of(stream).operation_seconds = operation_seconds;
  stream_of(stream).bytes_per_second = bytes_per_second;
}

void simdev_capacity(int device, size_t bytes) {
  const auto lock = locked();
  state().capacity[device] = bytes;
}

void simdev_refuse_pinning(int refuse) {
  const auto lock = locked();
  state().refuse_pinning = refuse != 0;
}

void simdev_host_by_thread(int each) {
  const auto lock = locked();
  state().host_by_thread = each != 0;
}

// From now on tasks take no time, and events have the time that they would have taken.
void simdev_virtual_time() {
  const auto lock = locked();
  State& s = state();
  s.virtual_time = true;
  s.virtual_began = now();
  s.host_time = 0;
  for (auto& stream : s.streams) stream->time = 0;
}

void simdev_pass_time(double seconds) {
  const auto lock = locked();
  state().host_time += seconds;
}

void simdev_fail_after(uint64_t tasks) {
  const auto lock = locked();
  state().fail_after = tasks;
}

void simdev_lose() {
  const auto lock = locked();
  state().lost = true;
  state().changed.notify_all();
}

void simdev_reset() {
  const auto lock = locked();
  State& s = state();
  for (auto& stream : s.streams) {
    stream->held = false;
    stream->operation_seconds = stream->bytes_per_second = 0;
  }
  for (size_t& bytes : s.capacity) bytes = kArena;
  s.refuse_pinning = s.host_by_thread = s.virtual_time = s.lost = false;
  s.fail_after = 0;
  wake();
}

// A task of a stream that calls back with where the device finds the memory, to read and write it.
void simdev_call(int stream, const char* name, void* address, size_t bytes,
                 void (*act)(uint64_t, void*), uint64_t number) {
  push(stream, name, {{address, bytes, false}, {address, bytes, true}}, bytes,
       [=] { act(number, reach(address)); });
}

void simdev_report(const char* what) { report(what); }

// The text of all reports since the last call, a line each, for the caller to copy at once.
const char* simdev_reports() {
  static thread_local std::string text;
  const auto lock = locked();
  State& s = state();
  {
    const Spin spin(s.guards);
    for (size_t i = 0; i < s.guards.fault_count; ++i) {
      s.reports.push_back(
          s.guards.faults[i].copy_to_host
              ? "early: the host touched memory that a copy to it fills, and has "
                "not waited for the copy"
              : "reused: the host wrote memory that a copy reads, and has not waited "
                "for the copy");
    }
    s.guards.fault_count = 0;
  }
  text.clear();
  for (const std::string& line : s.reports) text += line + "\n";
  s.reports.clear();
  return text.c_str();
}
}
