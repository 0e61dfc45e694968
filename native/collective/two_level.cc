// The order of calls on the node's communicator and on the leaders; two_level.h draws it.
#include "collective/two_level.h"

#include <algorithm>

namespace nostall::collective {
namespace {

std::byte* begin(Communicator& node, Leaders& leaders, const TwoLevelMessage& message) {
  const Elsewhere elsewhere(node);
  return leaders.begin(message);
}

void finish(Communicator& node, Leaders& leaders, uint32_t part) {
  const Elsewhere elsewhere(node);
  leaders.finish(part);
}

void end(Communicator& node, Leaders& leaders) {
  const Elsewhere elsewhere(node);
  leaders.end();
}

void run(Communicator& node, Leaders* leaders, const TwoLevelMessage& message,
         const CallOptions& options) {
  std::byte* const sums = leaders != nullptr ? begin(node, *leaders, message) : message.out;
  for (uint32_t p = 0; p < message.parts; ++p) {
    const Extent part = message.part(p);
    const uint64_t at = message.offset(part.begin);
    node.reduce(message.in + at, sums + at, part.count, *message.reducer, 0, options);
    if (leaders != nullptr) leaders->start(p);
  }
  for (uint32_t p = 0; p < message.parts; ++p) {
    const Extent part = message.part(p);
    if (leaders != nullptr) finish(node, *leaders, p);
    node.broadcast(message.out + message.offset(part.begin), message.offset(part.count), 0);
  }
  if (leaders != nullptr) end(node, *leaders);
}

}  // namespace

uint32_t parts_of(uint64_t bytes, uint64_t part_bytes, uint32_t most) noexcept {
  return static_cast<uint32_t>(std::clamp<uint64_t>(bytes / part_bytes, 1, most));
}

void two_level_allreduce(Communicator& node, Leaders* leaders, const TwoLevelMessage& message,
                         const CallOptions& options) {
  if (message.count == 0) return;
  try {
    run(node, leaders, message, options);
  } catch (const Error& error) {
    if (leaders != nullptr) node.end_from_here(error);
    throw;
  } catch (const std::exception& error) {
    if (leaders != nullptr) node.end_from_here(Error(ErrorKind::peer, error.what()));
    throw;
  }
}

}  // namespace nostall::collective
