// mpi/device_memory.h - buffers in memory of a GPU, which an MPI may take and the processor cannot read.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "base/error.h"
#include "mpi_state.h"

namespace nostall::mpi {

// What a call reads or writes on this rank; a buffer of 0 bytes may have any address.
struct Buffer {
  const void* data;
  uint64_t bytes;
};
// The error of a call with such a buffer, which ends the node's communicator; whether it is ours must
// not depend on a buffer.
std::optional<Error> device_error(CommunicatorState& state, std::initializer_list<Buffer> buffers);

}  // namespace nostall::mpi
