// tier/cache_view.h - a choice of the samples of a cache, which several readers share.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tier/node_cache.h"

namespace nostall::tier {

// Sample s of the view is sample numbers[s] of `whole`; without numbers they are the same. Processes
// that leave are no failures: those that share a cache come and go.
std::unique_ptr<NodeCache> view_of(std::shared_ptr<NodeCache> whole, std::vector<uint64_t> numbers);

}  // namespace nostall::tier
