// A table of algorithms is foreign text: it is refused with Error(usage), or it chooses an
// algorithm that there is for every size, the same one again from the same text.
#include <cstdlib>
#include <limits>
#include <string_view>

#include "collective/selection.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nostall;
  using namespace nostall::collective;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const uint32_t ranks : {1u, 2u, 7u, 1024u}) {
    try {
      const Selection selection(text, ranks), again(text, ranks);
      if (selection.hash() != again.hash()) std::abort();
      if (selection.empty() != (selection.hash() == 0)) std::abort();
      for (const uint64_t bytes :
           {uint64_t{0}, uint64_t{4096}, uint64_t{1} << 30, std::numeric_limits<uint64_t>::max()}) {
        for (const bool imbalanced : {false, true}) {
          const Algorithm chosen = selection.choose(bytes, imbalanced);
          if (find_algorithm(name_of(chosen)) != chosen) std::abort();
          if (again.choose(bytes, imbalanced) != chosen) std::abort();
        }
      }
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::usage) std::abort();
    }
  }
  return 0;
}
