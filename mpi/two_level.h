// mpi/two_level.h - allreduce over several nodes: collective/two_level.h, with the local leaders
// connected by the MPI on CommunicatorState::leaders.
//
// They use the MPI's own nonblocking allreduce, or, with NOSTALL_MPI_BETWEEN=arrival on all ranks,
// collective/node_allreduce.h over the MPI's point-to-point messages, by order of arrival. The
// latter needs a second buffer of the message's size on the leaders, two with MPI_IN_PLACE.
#pragma once

#include "mpi_state.h"
#include "reducers.h"

namespace nostall::mpi {

// All ranks of a communicator over several nodes call this; `in` may be `out`. `type` and `op` are
// those that `reducer` was made of.
void two_level_allreduce(CommunicatorState& state, const std::byte* in, std::byte* out,
                         uint64_t count, MPI_Datatype type, MPI_Op op, const MpiReducer& reducer);

}  // namespace nostall::mpi
