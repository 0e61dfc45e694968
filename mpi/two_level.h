// mpi/two_level.h - allreduce over several nodes whose part between nodes goes by order of arrival.
//
// collective/node_allreduce.h among the local leaders of all nodes, over the MPI's point-to-point
// messages on CommunicatorState::leaders, instead of the MPI's own allreduce among them. Chosen by
// NOSTALL_MPI_BETWEEN=exchange, which must be the same on all ranks. Needs a second buffer of the
// message's size on those ranks, two with MPI_IN_PLACE.
#pragma once

#include "mpi_state.h"

namespace nostall::mpi {

bool allreduces_by_arrival() noexcept;
// All ranks of a communicator over several nodes call this; `in` may be `out`.
void arrival_allreduce(CommunicatorState& state, const std::byte* in, std::byte* out,
                       uint64_t count, const MpiReducer& reducer);

}  // namespace nostall::mpi
