// mpi/receives.h - receives under way, each with a number of the caller's.
//
// For any MPI, SimGrid's too: include its header first. Thread-safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace nostall::mpi {

// A message that a receive got.
struct Received {
  uint64_t cookie, bytes;
};

class Receives {
 public:
  // A request to be started at once; the address is good until the next call.
  MPI_Request* add(uint64_t cookie) {
    cookies_.push_back(cookie);
    return &requests_.emplace_back(MPI_REQUEST_NULL);
  }
  // What was received since, in the order of MPI_Testsome. Returns the MPI's code; an error of a
  // receive is returned as its own.
  int collect(std::vector<Received>& received) {
    int count = 0;
    which_.resize(requests_.size());
    status_.resize(requests_.size());
    const int result = PMPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                                     which_.data(), status_.data());
    if (result != MPI_SUCCESS) return error_in(result, count);
    if (count == MPI_UNDEFINED || count == 0) return MPI_SUCCESS;
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      int bytes = 0;
      PMPI_Get_count(&status_[i], MPI_BYTE, &bytes);
      received.push_back({cookies_[static_cast<size_t>(which_[i])], static_cast<uint64_t>(bytes)});
    }
    size_t kept = 0;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      requests_[kept] = requests_[i];
      cookies_[kept++] = cookies_[i];
    }
    requests_.resize(kept);
    cookies_.resize(kept);
    return MPI_SUCCESS;
  }
  // In the order in which they were added, which stays.
  std::vector<MPI_Request>& requests() noexcept { return requests_; }
  // Forgets one that has ended; returns its cookie.
  uint64_t take(size_t index) {
    const uint64_t cookie = cookies_[index];
    requests_.erase(requests_.begin() + static_cast<std::ptrdiff_t>(index));
    cookies_.erase(cookies_.begin() + static_cast<std::ptrdiff_t>(index));
    return cookie;
  }

 private:
  int error_in(int result, int count) const {
    if (result != MPI_ERR_IN_STATUS) return result;
    for (size_t i = 0; count != MPI_UNDEFINED && i < static_cast<size_t>(count); ++i) {
      if (status_[i].MPI_ERROR != MPI_SUCCESS) return status_[i].MPI_ERROR;
    }
    return result;
  }

  std::vector<MPI_Request> requests_;
  std::vector<uint64_t> cookies_;
  std::vector<int> which_;
  std::vector<MPI_Status> status_;
};

}  // namespace nostall::mpi
