// tier/watch.h - work that a thread repeats at an interval.
#pragma once

#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "base/mutex.h"

namespace nostall::tier {

// Thread-safety: belongs to one thread. A forked child may only destroy its copy.
class Watch {
 public:
  // `work` throws nothing. Throws std::system_error if there can be no thread.
  Watch(const char* name, std::chrono::milliseconds interval, std::function<void()> work)
      : state_(std::make_unique<State>()) {
    State& state = *state_;
    state.thread = std::thread([&state, name, interval, work = std::move(work)] {
      pthread_setname_np(pthread_self(), name);
      MutexLock lock(state.mutex);
      while (!state.stopping) {
        state.stop.wait_for(lock, interval);
        if (state.stopping) return;
        lock.unlock();
        work();
        lock.lock();
      }
    });
  }
  ~Watch() {
    if (state_->owner != ::getpid()) {
      // In a forked child the thread does not exist, and the lock may be held for ever.
      [[maybe_unused]] State* lost = state_.release();
      return;
    }
    {
      const MutexLock lock(state_->mutex);
      state_->stopping = true;
    }
    state_->stop.notify_all();
    state_->thread.join();
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  struct State {
    const pid_t owner = ::getpid();
    Mutex mutex;
    Condition stop;
    bool stopping NOSTALL_GUARDED_BY(mutex) = false;
    std::thread thread;
  };
  std::unique_ptr<State> state_;
};

}  // namespace nostall::tier
