// Notices between nodes, the bounded wait of local leaders, and requests that outlive a failed
// call.
#include "between.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/mutex.h"

#ifdef NOSTALL_ERR_REVOKED
// Not in every MPI that has the error.
extern "C" __attribute__((weak)) int PMPIX_Comm_is_revoked(MPI_Comm comm, int* revoked);
extern "C" __attribute__((weak)) int PMPIX_Comm_failure_ack(MPI_Comm comm);
#endif

namespace nostall::mpi {
namespace {

constexpr int64_t kLookNs = 1'000'000;
// What is on its way when a call fails comes within this time or, most likely, not at all.
constexpr int64_t kGraceNs = 100'000'000;
constexpr int kNotice = 1;

struct Notice {
  int32_t error_class = MPI_ERR_OTHER;
  std::array<char, 508> why{};
};

// What the MPI may still read or write at any later time, so none is ever destroyed. Places stay
// where they are.
template <typename T>
class Kept {
 public:
  T& add(T value) {
    const MutexLock lock(mutex_);
    return all_.emplace_back(std::move(value));
  }

 private:
  Mutex mutex_;
  std::deque<T> all_ NOSTALL_GUARDED_BY(mutex_);
};

Error error_of(int error_class, const std::string& why) {
#ifdef NOSTALL_ERR_REVOKED
  if (error_class == NOSTALL_ERR_REVOKED) return {ErrorKind::stopped, why, error_class};
#endif
  return {ErrorKind::peer, why, error_class};
}

bool is_revoked([[maybe_unused]] MPI_Comm comm) {
  int revoked = 0;
#ifdef NOSTALL_ERR_REVOKED
  if (PMPIX_Comm_is_revoked != nullptr) PMPIX_Comm_is_revoked(comm, &revoked);
#endif
  return revoked != 0;
}

// Waits for a bounded time until the requests have ended, or failed.
void drain(std::vector<MPI_Request>& requests) {
  const int64_t end = now_ns() + kGraceNs;
  do {
    std::erase_if(requests, [](MPI_Request& request) {
      int gone = 0;
      return PMPI_Test(&request, &gone, MPI_STATUS_IGNORE) != MPI_SUCCESS || gone != 0;
    });
  } while (!requests.empty() && now_ns() < end);
}

}  // namespace

void listen(CommunicatorState& state) noexcept {
  if (state.notices == MPI_COMM_NULL || state.notified.load(std::memory_order_relaxed)) return;
#ifdef NOSTALL_ERR_REVOKED
  if (is_revoked(state.comm)) {
    state.notified.store(true);
    state.node->end(error_of(NOSTALL_ERR_REVOKED, "the communicator was revoked"));
    return;
  }
#endif
  int there = 0;
  MPI_Status status;
  if (PMPI_Iprobe(MPI_ANY_SOURCE, kNotice, state.notices, &there, &status) != MPI_SUCCESS) {
#ifdef NOSTALL_ERR_REVOKED
    // A rank of another node has failed: notices of the others still count.
    if (PMPIX_Comm_failure_ack != nullptr) PMPIX_Comm_failure_ack(state.notices);
#endif
    return;
  }
  Notice notice;
  if (there == 0 || PMPI_Recv(&notice, sizeof notice, MPI_BYTE, status.MPI_SOURCE, kNotice,
                              state.notices, MPI_STATUS_IGNORE) != MPI_SUCCESS) {
    return;
  }
  state.notified.store(true);  // the rank that notified this one notifies all
  state.node->end_from_here(error_of(notice.error_class, notice.why.data()));
}

bool has_ended(CommunicatorState& state) noexcept {
  listen(state);
  try {
    state.node->check();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void notify_other_nodes(CommunicatorState& state, const Error& why) noexcept {
  if (state.notices == MPI_COMM_NULL || !state.node->ended_here() ||
      state.notified.exchange(true)) {
    return;
  }
  // The MPI may read them at any time later.
  static Kept<Notice>& notices = *new Kept<Notice>;
  Notice* const notice = &notices.add({});
  notice->error_class = class_of(why);
  std::snprintf(notice->why.data(), notice->why.size(), "on the node of rank %d: %s", state.rank,
                why.what());
  std::vector<MPI_Request> requests;
  const int mine = state.node_of[static_cast<size_t>(state.rank)];
  for (int r = 0; r < state.ranks; ++r) {
    if (state.node_of[static_cast<size_t>(r)] == mine) continue;
    MPI_Request request = MPI_REQUEST_NULL;
    if (PMPI_Isend(notice, sizeof *notice, MPI_BYTE, r, kNotice, state.notices, &request) ==
        MPI_SUCCESS) {
      requests.push_back(request);
    }
  }
  drain(requests);
}

void check_between(CommunicatorState& state, const char* operation, int result) {
  if (result == MPI_SUCCESS) return;
  int error_class = MPI_ERR_OTHER, length = 0;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  PMPI_Error_class(result, &error_class);
  PMPI_Error_string(result, text.data(), &length);
  const Error error = error_of(error_class, std::string("the MPI's part of ") + operation +
                                                " between nodes failed: " + text.data());
  state.node->end_from_here(error);
  throw error;
}

Lookout::Lookout(CommunicatorState& state, const char* operation)
    : state_(state), operation_(operation), began_(now_ns()), next_(began_ + kLookNs) {}

void Lookout::restart() {
  collective::Elsewhere::progressed(*state_.node);
  began_ = now_ns();
}

void Lookout::look() {
  const int64_t now = now_ns();
  if (now < next_) return;
  next_ = now + kLookNs;
  listen(state_);
  state_.node->check();
  const int64_t most = state_.timeout_ns;
  if (now - began_ < most) return;
  const Error error(ErrorKind::peer,
                    "rank " + std::to_string(state_.rank) + " waited " +
                        std::to_string(static_cast<double>(most) / 1e9).substr(0, 6) +
                        " s for other nodes in " + operation_ +
                        "; find out what their ranks do, or raise NOSTALL_MPI_TIMEOUT");
  state_.node->end_from_here(error);
  throw error;
}

void keep(std::shared_ptr<void> memory) {
  static auto& kept = *new Kept<std::shared_ptr<void>>;
  kept.add(std::move(memory));
}

void give_up(CommunicatorState& state, std::vector<MPI_Request>& requests) noexcept {
  std::erase(requests, MPI_REQUEST_NULL);
  if (!requests.empty()) drain(requests);
  if (!requests.empty()) state.keeps_leaders = true;
}

void LeaderRequests::wait(size_t index) {
  const collective::Elsewhere elsewhere(*state_.node);
  Lookout lookout(state_, operation_);
  for (;; lookout.look()) {
    int done = 0;
    const int result = PMPI_Test(&requests_[index], &done, MPI_STATUS_IGNORE);
    if (result != MPI_SUCCESS) requests_[index] = MPI_REQUEST_NULL;
    check_between(state_, operation_, result);
    if (done != 0) return;
  }
}

}  // namespace nostall::mpi
