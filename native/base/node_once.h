// base/node_once.h - what all processes of a user on a node would make alike, made by one of them.
//
// The first process that wants what a key names makes it, as files without names, and gives these to
// the others for as long as its NodeOnce lives. Those that want it meanwhile wait; when the process
// that makes it ends, however it ends, the next one does. Processes that cannot find each other make
// it each for itself. Thread-safety: a NodeOnce belongs to one thread.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/handover.h"

namespace nostall {

class NodeOnce {
 public:
  using Make = std::function<std::vector<Descriptor>()>;

  // `key`: equal for what is equal, byte for byte, in all jobs and releases.
  explicit NodeOnce(const std::string& key);

  // The files: those of another process, or what `make` returns, none if they cannot be shared.
  // After `patience` this process waits no longer, and makes its own, with a warning. `waiting` is
  // called now and then, and may throw. Throws what `make` throws.
  const std::vector<Descriptor>& get(const Make& make, std::chrono::nanoseconds patience,
                                     const std::function<void()>& waiting = {});
  // Whether this process made them.
  bool made() const noexcept { return made_; }

 private:
  std::vector<Descriptor> files_;  // outlive what gives them
  Handover handover_;
  bool made_ = false;
};

}  // namespace nostall
