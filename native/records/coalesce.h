// records/coalesce.h - which pieces of a file to read together, and from when on that pays.
//
// LMDBIO-COAL [Pumma 2020, sec. 5.2.3] reads what several iterations want in one operation, as much
// as memory allows. Here the limits follow from the measured cost of the storage.
// Thread-safety: coalesce() is pure; a StorageCost may be used from any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "base/mutex.h"

namespace nostall::records {

struct Piece {
  uint32_t file = 0;
  uint64_t offset = 0, length = 0;
  uint32_t index = 0;  // the caller's
};

struct CoalesceLimits {
  uint64_t gap = 0;  // unwanted bytes between two pieces that are worth reading through
  uint64_t bytes = ~uint64_t{0};  // of one read; a larger piece is read alone
};

// Pieces [first, first + count) of the sorted list, read as one range.
struct Together {
  uint32_t file = 0;
  uint64_t offset = 0, length = 0;
  size_t first = 0, count = 0;
};

// Sorts `pieces` by place and cuts them into ranges; every piece is in exactly one.
std::vector<Together> coalesce(std::vector<Piece>& pieces, CoalesceLimits limits);

// What reading costs: seconds per operation and seconds per byte, fitted to measurements (least
// squares, older ones weigh less). The first guess is a fast local disk.
class StorageCost {
 public:
  // Records one call that made `operations` reads of `bytes` in all and took `seconds`.
  void record(double operations, double bytes, double seconds);

  double seconds_per_operation() const;
  double seconds_per_byte() const;
  // gap: the length at which reading on costs as much as one more operation. bytes: the size at
  // which nine tenths of a read's time are spent on bytes, within [64 KiB, max_bytes].
  // Reads of equal size show what a read costs, but not how the cost divides into operation and
  // bytes. Until the sizes have differed, no gap is longer than `piece`, the mean wanted length: at
  // worst this reads twice the bytes, or makes twice the operations. Gaps within a page, such as
  // the headers of a tar, are always read through, for a device reads whole pages anyway.
  CoalesceLimits limits(uint64_t max_bytes, uint64_t piece = ~uint64_t{0}) const;

 private:
  struct Fit {
    double operation = 0.0, byte = 0.0;
  };
  Fit fit() const;
  bool alike() const;  // whether all calls had about the same bytes per operation

  mutable Mutex mutex_;
  // Sums of products, of the normal equations.
  struct Sums {
    double oo = 0.0, ob = 0.0, bb = 0.0, ot = 0.0, bt = 0.0;
  };
  Sums sums_ NOSTALL_GUARDED_BY(mutex_);
};

}  // namespace nostall::records
