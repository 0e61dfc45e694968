// runtime.h - a simulated accelerator, without torch: memory, streams, events, and what went wrong.
//
// Device memory is a file mapped twice. Programs see an address that no thread may touch; the
// device uses the other one (`reach`). Pinned host memory is mapped twice too, so that its pages
// can be closed to the host while a copy that no host thread has waited for uses them.
// A stream is a thread with a queue. A task first takes its time, then acts: a copy reads its
// source at the end. Streams get addresses, never owners, as a GPU does.
//
// Errors are found by bookkeeping, not by luck. Every stream and the host is a timeline with a
// vector clock. A task that touches what another timeline touched, without an event in between, is
// reported when it is enqueued. A host thread that touches pages of an unfinished copy faults, and
// is reported: unfinished means that no host thread has waited for it, however long ago it ran.
// Thread-safety: all functions, from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace simdev {

constexpr int kDevices = 2;

struct Range {
  const void* begin;
  size_t bytes;
  bool write;
};

using Clock = std::vector<uint64_t>;  // by timeline; what is missing is 0

// A place in the queue of a stream: reached, or not yet.
struct Mark {
  bool done = false;
  Clock clock;
  double seconds = 0;
  double time = 0;  // by the virtual clock
};

struct Event {
  std::shared_ptr<Mark> mark;  // null: never recorded
};

// --- memory
void* take_device(int device, size_t bytes);  // null: there is no room
void give_device(int device, void* address, size_t bytes);
void* take_pinned(size_t bytes);  // null: refused, or there is no room
void give_pinned(void* address, size_t bytes);
bool is_device(const void* address);
int device_of(const void* address);
bool is_pinned(const void* address);
size_t capacity(int device);
void* reach(const void* address);  // where the device finds it

// --- streams; numbers 0 .. kDevices - 1 are the devices' default streams
int new_stream(int device);
int device_of_stream(int stream);
// `guarded` is pinned memory that the host must leave alone until it has waited for the task.
void push(int stream, const std::string& name, const std::vector<Range>& touched, size_t bytes,
          std::function<void()> act, const Range* guarded = nullptr);
// Fills memory that is taken again, so that early reads are seen: no real device does, and it takes
// no time.
void poison(int stream, void* address, size_t bytes);
// Whether a task that no host thread has waited for uses this pinned memory.
bool is_guarded(const void* address, size_t bytes);
bool query(int stream);
void synchronize(int stream);
void synchronize_device(int device);

void record(Event& event, int stream);
void block(const Event& event, int stream);
bool query(const Event& event);
void synchronize(const Event& event);
double milliseconds(const Event& from, const Event& to);

// What streams did between the two calls, in seconds of the monotonic clock.
struct Done {
  std::string name;
  int device = 0, stream = 0;
  size_t bytes = 0;
  double begin = 0, end = 0;
};
void start_log();
std::vector<Done> stop_log();

bool is_forked();  // a child of the process that has the device
void report(const std::string& what);

}  // namespace simdev
