// mpi/nonblocking.h - nonblocking collectives: the blocking ones, on a thread of the communicator.
//
// MPI_Iallreduce, MPI_Ireduce, MPI_Ibcast and MPI_Ibarrier become an entry of the communicator's
// queue and a generalized request. A thread takes entries in the order of the calls, which MPI
// makes the same on all ranks; so does a thread that waits for one (MPI_Wait, MPI_Waitall), so
// that none spins while there is work. Blocking calls of the same communicator run behind what is
// queued. Communicators have queues of their own, since ranks may call on them in different orders.
//
// A request ends from another thread than the program's: the MPI must provide MPI_THREAD_MULTIPLE.
// Messages below NOSTALL_MPI_NONBLOCKING bytes (32768 by default; "off": all) are left to the MPI:
// to wake a thread costs more than they do.
// Thread-safety: all of it.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "base/mutex.h"

namespace nostall::mpi {

// The least message that is ours; ~0 where none is.
uint64_t nonblocking_from();

class Queue : public std::enable_shared_from_this<Queue> {
 public:
  Queue() = default;
  // Finishes what was started.
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Appends an operation that returns an MPI error code; *request is complete when it has run. Runs
  // it here, and says so once, if the system gives no thread for it.
  int start(std::function<int()> operation, MPI_Request* request);
  // Runs what was started before, if anything; blocking calls begin with it.
  void drain();
  bool idle() const;

  // Runs what was started first, up to `number` of them.
  void run_until(uint64_t number);

 private:
  struct Entry {
    std::function<int()> operation;
    MPI_Request request;
  };
  void serve();

  mutable Mutex mutex_;
  Condition more_, ended_;  // something was started; an entry has run
  std::deque<std::shared_ptr<Entry>> waiting_ NOSTALL_GUARDED_BY(mutex_);
  uint64_t started_ NOSTALL_GUARDED_BY(mutex_) = 0;
  uint64_t finished_ NOSTALL_GUARDED_BY(mutex_) = 0;
  bool ends_ NOSTALL_GUARDED_BY(mutex_) = false;
  bool running_ NOSTALL_GUARDED_BY(mutex_) = false;  // a thread runs an entry
  std::thread thread_ NOSTALL_GUARDED_BY(mutex_);
};

// Returns when the request has run, if it is one of ours; helps.
void finish(MPI_Request request);

}  // namespace nostall::mpi
