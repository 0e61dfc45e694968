// base/handover.h - how processes of one user on a node share open files that have no name.
//
// Each process that has the files listens at a name of its own, for processes of its user. A
// process that joins finds one that is alive and receives its descriptors. The names are abstract
// sockets, which the kernel removes with the process, however it ends: nothing is left in a file
// system, and no file can be planted. If the kernel says that another user has taken a name, the
// next of a few names is used. Processes of one node must share a network namespace. Thread-safety:
// a Handover belongs to one thread. A forked child may only destroy its copy.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/own.h"

namespace nostall {

class Handover {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  // Is called now and then while a call waits, which ends with what it throws.
  using Waiting = std::function<void()>;

  // `job` is the same for all processes that share, and for no other; `member` is below `members`.
  Handover(const std::string& job, uint32_t member, uint32_t members);
  ~Handover();
  Handover(const Handover&) = delete;
  Handover& operator=(const Handover&) = delete;

  // Held by one process at a time: by one that looks for the files and creates them if there are
  // none, and by one that leaves. Ends with the object or the process.
  class Turn {
   public:
    explicit Turn(Descriptor socket) noexcept;
    Turn(Turn&&) noexcept = default;
    Turn& operator=(Turn&&) = delete;
    ~Turn();

   private:
    Descriptor socket_;
  };
  // Waits for it. Throws Error(peer) at the deadline, with the process that holds it, and Error(io)
  // if all names are another user's, or a program of this one has one and takes no callers.
  Turn turn(Deadline deadline, const Waiting& waiting = {}) const;

  // The files of a member that is alive, as it gave them, or nothing if there is none. Throws
  // Error(peer) if there is one, but it does not answer before the deadline, and Error(io) if its
  // system or this one refuses to pass descriptors on.
  std::vector<Descriptor> ask(Deadline deadline, const Waiting& waiting = {}) const;

  // From now on others get these descriptors; an empty place is -1, and there are at most 64. They
  // must stay open until stop(). Throws Error(io) if that cannot be.
  void give(std::vector<int> files);
  void stop() noexcept;

  // What the names of its sockets begin with.
  const std::string& base() const noexcept { return base_; }

 private:
  struct Giving;
  std::string name(uint32_t attempt, const std::string& last) const;
  const std::string base_;
  const uint32_t member_, members_;
  std::unique_ptr<Giving> giving_;
};

}  // namespace nostall
