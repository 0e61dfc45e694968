// SMPI's messages as the collectives use them, and the simulated time that adding takes.
#include "simulated.h"

#include <simgrid/actor.h>
#include <smpi/smpi.h>

#include <algorithm>
#include <cstring>

namespace nostall::simulated {

Costs& costs() {
  static Costs all;
  return all;
}

void charge(double seconds) {
  if (seconds > 0) sg_actor_sleep_for(seconds);
}

void add_up(float* into, const float* a, const float* b, uint64_t count) {
  charge(static_cast<double>(count * sizeof(float)) / (a != nullptr ? costs().add : costs().copy));
  if (!costs().real) return;
  if (a == nullptr) {
    if (into != b) std::memcpy(into, b, count * sizeof(float));
  } else {
    for (uint64_t i = 0; i < count; ++i) into[i] = a[i] + b[i];
  }
}

Memory::Memory(uint64_t bytes) : own_(costs().real ? bytes + 1 : 0), data_(own_.data()) {
  static std::byte* const shared = static_cast<std::byte*>(
      costs().real ? nullptr : SMPI_SHARED_MALLOC(std::max<uint64_t>(costs().largest, 1 << 20)));
  if (!costs().real) data_ = shared;
}

void Mailroom::start(const Letter& letter, std::vector<MPI_Request>& requests) {
  requests.emplace_back();
  MPI_Isend(letter.data, letter.bytes, MPI_BYTE, letter.to, letter.tag, letter.comm,
            &requests.back());
}

void Mailroom::send(MPI_Comm comm, uint32_t to, uint32_t tag, const void* data, uint64_t bytes,
                    bool queued) {
  const Letter letter{comm, static_cast<int>(to), static_cast<int>(tag), static_cast<int>(bytes),
                      data};
  if (!queued) {
    start(letter, sends_);
  } else if (leaving_.size() < kAtOnce) {
    start(letter, leaving_);
  } else {
    queue_.push_back(letter);
  }
}

void Mailroom::receive(MPI_Comm comm, uint32_t from, uint32_t tag, void* data, uint64_t bytes,
                       uint64_t cookie) {
  MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, static_cast<int>(from), static_cast<int>(tag),
            comm, receives_.add(cookie));
}

// One test sees only a part of what is there.
void Mailroom::look(const Handler& handler) {
  while (look_once(handler)) {
  }
}

bool Mailroom::look_once(const Handler& handler) {
  std::vector<mpi::Received> received;
  if (receives_.requests().empty()) return false;
  receives_.collect(received);
  for (const mpi::Received& message : received) handler(message.cookie, message.bytes);
  return !received.empty();
}

void Mailroom::wait(const Handler& handler) {
  std::vector<MPI_Request> all(leaving_);
  all.insert(all.end(), receives_.requests().begin(), receives_.requests().end());
  int which = 0, bytes = 0;
  MPI_Status status;
  MPI_Waitany(static_cast<int>(all.size()), all.data(), &which, &status);
  const auto i = static_cast<size_t>(which);
  if (i < leaving_.size()) {
    leaving_.erase(leaving_.begin() + which);
    if (queue_.empty()) return;
    start(queue_.front(), leaving_);
    queue_.pop_front();
    return;
  }
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  // What was asked for first is looked for first.
  handler(receives_.take(i - leaving_.size()), static_cast<uint64_t>(bytes));
}

void Mailroom::flush() {
  while (!queue_.empty()) wait({});
  for (std::vector<MPI_Request>* requests : {&leaving_, &sends_}) {
    MPI_Waitall(static_cast<int>(requests->size()), requests->data(), MPI_STATUSES_IGNORE);
    requests->clear();
  }
}

}  // namespace nostall::simulated
