// MPI_Alloc_mem: memory that the ranks of MPI_COMM_WORLD on this node reach, so that allreduces of
// it are folded where it is.
#include <cstdio>

#include "base/error.h"
#include "wrappers.h"

namespace nostall::mpi {
namespace {

// Below this a copy through the caches costs less than to fold in place, and pages are too coarse.
constexpr MPI_Aint kFrom = 256 << 10;

}  // namespace
}  // namespace nostall::mpi

namespace own = nostall::mpi;

NOSTALL_EXPORT int MPI_Alloc_mem(MPI_Aint size, MPI_Info info, void* base) {
  nostall::collective::Communicator* arena = own::arena();
  if (arena != nullptr && size >= own::kFrom) {
    try {
      if (void* data = arena->allocate(static_cast<uint64_t>(size))) {
        *static_cast<void**>(base) = data;
        own::counters().allocations.fetch_add(1, std::memory_order_relaxed);
        return MPI_SUCCESS;
      }
    } catch (const nostall::Error& error) {
      std::fprintf(stderr, "nostall: MPI_Alloc_mem is left to the MPI: %s\n", error.what());
    }
  }
  return PMPI_Alloc_mem(size, info, base);
}

NOSTALL_EXPORT int MPI_Free_mem(void* base) {
  nostall::collective::Communicator* arena = own::arena();
  return arena != nullptr && arena->release(base) ? MPI_SUCCESS : PMPI_Free_mem(base);
}
