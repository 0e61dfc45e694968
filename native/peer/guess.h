// peer/guess.h - whether another node has a sample already, estimated from this node's own progress:
// the heuristic of HDMLP [Böhringer 2020, sec. 4.3.6], which sends no notices.
#pragma once

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "plan/copies.h"
#include "tier/node_cache.h"

namespace nostall::peer {

// A tier of this node must be so many samples further than the other's place of the sample.
inline constexpr size_t kGuessAhead = 10;

class Guess {
 public:
  // `fill` is what each tier of this node is filled with, in order.
  Guess(plan::Copies copies, std::vector<std::vector<plan::SampleId>> fill,
        std::shared_ptr<tier::NodeCache> cache);

  // Whether the node that keeps the sample has it: it has if this node has no such tier, has filled
  // it, or is kGuessAhead samples further. Thread-safe.
  bool there(plan::SampleId sample);

 private:
  // A tier's samples, of which the first `reached` are there or failed.
  struct Filling {
    std::vector<plan::SampleId> samples;
    size_t reached = 0;
  };

  const plan::Copies copies_;
  const std::shared_ptr<tier::NodeCache> cache_;
  Mutex mutex_;
  std::vector<Filling> tiers_ NOSTALL_GUARDED_BY(mutex_);
};

}  // namespace nostall::peer
