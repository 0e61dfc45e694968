// CUDA's driver is asked, in a process that has loaded it.
#include "device_memory.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

namespace nostall::mpi {
namespace {

using GetAttribute = int (*)(void* value, int attribute, uintptr_t address);

// How many libraries were loaded, ever.
unsigned long long loaded() noexcept {
  unsigned long long count = 0;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* into) {
        *static_cast<unsigned long long*>(into) = info->dlpi_adds;
        return 1;  // the first one says it
      },
      &count);
  return count;
}

// Null where no CUDA was loaded; a program may load it at any time.
GetAttribute get_attribute() noexcept {
  static std::atomic<GetAttribute> found{nullptr};
  static std::atomic<unsigned long long> looked_at{0};
  if (const GetAttribute known = found.load(std::memory_order_relaxed)) return known;
  const unsigned long long now = loaded();
  if (looked_at.load(std::memory_order_relaxed) == now) return nullptr;
  if (void* library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD)) {
    found.store(reinterpret_cast<GetAttribute>(::dlsym(library, "cuPointerGetAttribute")),
                std::memory_order_relaxed);
  }
  looked_at.store(now, std::memory_order_relaxed);
  return found.load(std::memory_order_relaxed);
}

bool is_on_device(GetAttribute get, const void* buffer) noexcept {
  constexpr int kMemoryType = 2, kIsManaged = 8;  // CU_POINTER_ATTRIBUTE_...
  constexpr unsigned kDevice = 2;                 // CU_MEMORYTYPE_DEVICE
  const auto address = reinterpret_cast<uintptr_t>(buffer);
  unsigned type = 0, managed = 0;
  // Other memory is none that it knows.
  if (get(&type, kMemoryType, address) != 0 || type != kDevice) return false;
  return get(&managed, kIsManaged, address) != 0 || managed == 0;
}

}  // namespace

std::optional<Error> device_error(CommunicatorState& state, std::initializer_list<Buffer> buffers) {
  const GetAttribute get = get_attribute();
  if (get == nullptr || std::none_of(buffers.begin(), buffers.end(), [get](const Buffer& buffer) {
        return buffer.bytes > 0 && is_on_device(get, buffer.data);
      })) {
    return {};
  }
  const Error why(
      ErrorKind::usage,
      "rank " + std::to_string(state.rank) +
          " calls a collective with a buffer in memory of a GPU, which nostall does not "
          "read: set NOSTALL_MPI=off on all ranks, or copy it to the host first");
  state.node->end_from_here(why);
  return why;
}

}  // namespace nostall::mpi
