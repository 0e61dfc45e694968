// The first of the processes of a node, by the turn of a Handover.
#include "base/node_once.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "base/log.h"

namespace nostall {
namespace {

using Clock = std::chrono::steady_clock;

// A process that has the files answers at once.
constexpr std::chrono::seconds kAnswer{20};
// Between two calls of `waiting`, at first and at most; for long waits a sixtieth of it: each is a
// connection to the process that has the turn or the files, of which it takes some thousands.
constexpr std::chrono::milliseconds kAttention{200}, kMostAttention{5000};

bool is_of_others(const Error& error) {
  return error.kind() == ErrorKind::io || error.kind() == ErrorKind::peer;
}

// What `attempt` returns, which is called with a deadline and throws Error(peer) at it.
template <typename Attempt>
auto patiently(std::chrono::nanoseconds patience, const std::function<void()>& waiting,
               const Attempt& attempt) {
  const auto deadline = Clock::now() + patience;
  std::chrono::nanoseconds attention = kAttention;
  for (;;) {
    const auto next = waiting ? Clock::now() + attention : deadline;
    try {
      return attempt(std::min<Clock::time_point>(next, deadline));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::peer || Clock::now() >= deadline) throw;
    }
    if (waiting) waiting();
    attention =
        std::min(2 * attention, std::max<std::chrono::nanoseconds>(kMostAttention, patience / 60));
  }
}

}  // namespace

NodeOnce::NodeOnce(const std::string& key) : handover_(key, 0, 1) {}

// Whether another process has them. Throws Error(peer) if `use` refuses them.
bool NodeOnce::found(const Use& use, const std::function<void()>& waiting) {
  files_ =
      patiently(kAnswer, waiting, [this](Clock::time_point until) { return handover_.ask(until); });
  if (files_.empty()) return false;
  try {
    use(files_);
  } catch (const Error& error) {
    throw Error(ErrorKind::peer, error.what());
  }
  return true;
}

const NodeOnce::Files& NodeOnce::get(const Make& make, const Use& use,
                                     std::chrono::nanoseconds patience,
                                     const std::function<void()>& waiting) {
  std::optional<Handover::Turn> turn;
  try {
    if (found(use, waiting)) return files_;
    turn.emplace(patiently(patience, waiting,
                           [this](Clock::time_point until) { return handover_.turn(until); }));
    if (found(use, waiting)) return files_;
  } catch (const Error& error) {
    if (!is_of_others(error)) throw;
    log(LogLevel::warning, std::string(error.what()) + "; this process makes its own copy");
  }
  files_ = make();
  made_ = true;
  if (!turn || files_.empty()) return files_;
  std::vector<int> given;
  for (const Descriptor& file : files_) given.push_back(file.get());
  try {
    handover_.give(std::move(given));
  } catch (const Error& error) {
    log(LogLevel::warning, std::string(error.what()) + "; they make their own copies");
  }
  return files_;
}

}  // namespace nostall
