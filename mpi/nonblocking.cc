// The queue of a communicator's nonblocking calls, and the thread that runs them.
#include "nonblocking.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <system_error>
#include <utility>

namespace nostall::mpi {
namespace {

struct Place {
  std::weak_ptr<Queue> queue;  // its communicator's alone: the queue's thread must not end it
  uint64_t number = 0;
};
// Requests under way and their queues; few at a time.
struct Requests {
  Mutex mutex;
  std::map<MPI_Request, Place> places NOSTALL_GUARDED_BY(mutex);
};
Requests& requests() {
  static Requests& all = *new Requests;  // as communicators' registry: it outlasts exit handlers
  return all;
}
std::atomic<uint64_t>& under_way() {
  static std::atomic<uint64_t> count{0};
  return count;
}

void tell_of_no_thread(const std::system_error& error) {
  static std::atomic<bool> told{false};
  if (told.exchange(true)) return;
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::fprintf(
      stderr,
      "nostall: rank %d gets no thread for nonblocking collectives (%s), so it completes "
      "them where they are called, which hangs if other ranks call others first: raise the "
      "limit of processes, or leave them to the MPI by NOSTALL_MPI_NONBLOCKING=off on all "
      "ranks\n",
      rank, error.code().message().c_str());
}

// The calls of a generalized request; its state is the result of the operation.
int query(void* state, MPI_Status* status) {
  PMPI_Status_set_elements(status, MPI_BYTE, 0);
  PMPI_Status_set_cancelled(status, 0);
  status->MPI_SOURCE = MPI_UNDEFINED;
  status->MPI_TAG = MPI_UNDEFINED;
  return *static_cast<std::atomic<int>*>(state);
}
int release(void* state) {
  delete static_cast<std::atomic<int>*>(state);
  return MPI_SUCCESS;
}
int cancel(void*, int) { return MPI_SUCCESS; }

}  // namespace

uint64_t nonblocking_from() {
  static const uint64_t from = []() -> uint64_t {
    int provided = MPI_THREAD_SINGLE;
    PMPI_Query_thread(&provided);
    const char* wanted = std::getenv("NOSTALL_MPI_NONBLOCKING");
    if (provided != MPI_THREAD_MULTIPLE || (wanted != nullptr && std::strcmp(wanted, "off") == 0)) {
      return ~uint64_t{0};
    }
    return wanted == nullptr ? uint64_t{32} << 10 : std::strtoull(wanted, nullptr, 10);
  }();
  return from;
}

Queue::~Queue() {
  drain();
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  more_.notify_all();
  if (thread_.joinable()) thread_.join();
}

int Queue::start(std::function<int()> operation, MPI_Request* request) {
  auto result = std::make_unique<std::atomic<int>>(MPI_SUCCESS);
  std::atomic<int>* state = result.get();
  const int error = PMPI_Grequest_start(query, release, cancel, state, request);
  if (error != MPI_SUCCESS) return error;
  static_cast<void>(result.release());  // the request frees it
  auto entry = std::make_shared<Entry>();
  entry->request = *request;
  entry->operation = [run = std::move(operation), state] { return *state = run(); };
  uint64_t until = 0;
  {
    const MutexLock lock(mutex_);
    waiting_.push_back(entry);
    ++started_;
    {
      Requests& all = requests();
      const MutexLock of_requests(all.mutex);
      all.places[*request] = {weak_from_this(), started_};
    }
    under_way().fetch_add(1, std::memory_order_relaxed);
    try {
      if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    } catch (const std::system_error& refused) {
      tell_of_no_thread(refused);
      until = started_;
    }
  }
  if (until > 0) run_until(until);
  more_.notify_one();
  return MPI_SUCCESS;
}

void Queue::run_until(uint64_t number) {
  MutexLock lock(mutex_);
  while (finished_ < number) {
    if (running_) {  // another thread's: it may be a later call than the one that is waited for here
      ended_.wait(lock);
      continue;
    }
    running_ = true;
    const std::shared_ptr<Entry> next = waiting_.front();
    waiting_.pop_front();
    lock.unlock();
    next->operation();
    {
      Requests& all = requests();
      const MutexLock of_requests(all.mutex);
      all.places.erase(next->request);
    }
    under_way().fetch_sub(1, std::memory_order_relaxed);
    // From here on the program may free the request, and its handle may be used again.
    PMPI_Grequest_complete(next->request);
    lock.lock();
    running_ = false;
    ++finished_;
    ended_.notify_all();
  }
}

void Queue::serve() {
  for (;;) {
    uint64_t until = 0;
    {
      MutexLock lock(mutex_);
      while (!ends_ && started_ == finished_) more_.wait(lock);
      if (started_ == finished_) return;
      until = finished_ + 1;
    }
    run_until(until);
  }
}

void Queue::drain() {
  uint64_t until = 0;
  {
    const MutexLock lock(mutex_);
    if (started_ == finished_) return;
    until = started_;
  }
  run_until(until);
}

bool Queue::idle() const {
  const MutexLock lock(mutex_);
  return started_ == finished_;
}

void finish(MPI_Request request) {
  if (under_way().load(std::memory_order_relaxed) == 0) return;
  Place ours;
  {
    Requests& all = requests();
    const MutexLock lock(all.mutex);
    const auto found = all.places.find(request);
    if (found != all.places.end()) ours = found->second;
  }
  if (const auto queue = ours.queue.lock()) queue->run_until(ours.number);
}

}  // namespace nostall::mpi
