// The first of the processes of a node, by the turn of a Handover.
#include "base/node_once.h"

#include <optional>

#include "base/error.h"
#include "base/log.h"

namespace nostall {
namespace {

using Clock = std::chrono::steady_clock;

// A process that has the files answers at once.
constexpr std::chrono::seconds kAnswer{20};

bool is_of_others(const Error& error) {
  return error.kind() == ErrorKind::io || error.kind() == ErrorKind::peer;
}

}  // namespace

NodeOnce::NodeOnce(const std::string& key) : handover_(key, 0, 1) {}

// Whether another process has them. Throws Error(peer) if `use` refuses them.
bool NodeOnce::found(const Use& use, const Handover::Waiting& waiting) {
  files_ = handover_.ask(Clock::now() + kAnswer, waiting);
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
                                     const Handover::Waiting& waiting) {
  std::optional<Handover::Turn> turn;
  try {
    if (found(use, waiting)) return files_;
    turn.emplace(handover_.turn(Clock::now() + patience, waiting));
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
