// mpi/reducers.h - MPI operations on MPI types, as collective/ computes them.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "collective/reducer.h"

namespace nostall::mpi {

// An MPI operation on an MPI type as a collective::Reducer; nothing if the type has gaps, or the
// standard no such operation for it.
class MpiReducer {
 public:
  // Valid until this thread's next call; null if the MPI has to do it.
  static const MpiReducer* find(MPI_Datatype type, MPI_Op op);
  const collective::Reducer& get() const noexcept { return *reducer_; }
  size_t element_bytes() const noexcept { return reducer_->element_bytes(); }
  // Computed here; otherwise by the MPI or the program.
  bool has_kernel() const noexcept { return !operation_; }

 private:
  static std::optional<MpiReducer> make(MPI_Datatype type, MPI_Op op);
  struct Operation {
    MPI_Datatype type;
    MPI_Op op;
  };
  std::shared_ptr<Operation> operation_;  // at a fixed address: a user's operation points to it
  std::optional<collective::Reducer> reducer_;
};
// Whether elements of a type fill memory from the buffer's address on, in any order.
bool has_no_gaps(MPI_Datatype type, uint64_t* element_bytes);
// Whether they lie there as MPI_Pack would put them. False also for some that do, of which the MPI does
// not tell: those of MPI_Type_create_struct, say.
bool is_contiguous(MPI_Datatype type);

}  // namespace nostall::mpi
