// base/node_once.h - what all processes of a user on a node would make alike, made by one of them.
//
// The first process that needs what a key names makes it, as files without names, and passes these to
// the others for as long as its NodeOnce lives. The others wait meanwhile. If the process that makes
// it ends, however it ends, the next one makes it. Processes that cannot find each other make it each
// for itself. Thread-safety: a NodeOnce belongs to one thread.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/handover.h"

namespace nostall {

class NodeOnce {
 public:
  using Files = std::vector<Descriptor>;
  using Make = std::function<Files()>;
  using Use = std::function<void(const Files&)>;

  // `key`: equal for what is equal, byte for byte, in all jobs and releases.
  explicit NodeOnce(const std::string& key);

  // The files: those of another process, of which `use` throws no Error, or what `make` returns, none
  // if they cannot be shared. Where others' files are of no use, and after `patience`, this process
  // makes its own, with a warning. `waiting` is called now and then, and may throw. Throws what
  // `make` throws.
  const Files& get(const Make& make, const Use& use, std::chrono::nanoseconds patience,
                   const Handover::Waiting& waiting = {});
  // Whether this process made them.
  bool made() const noexcept { return made_; }

 private:
  bool found(const Use& use, const Handover::Waiting& waiting);
  Files files_;  // outlive what gives them
  Handover handover_;
  bool made_ = false;
};

}  // namespace nostall
