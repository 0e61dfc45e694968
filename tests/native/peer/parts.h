// What a node of a test is made of: a real tier, and which samples are its own.
#pragma once

#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "plan/owners.h"
#include "tier/node_cache.h"

namespace nostall::peer {

// Sample s belongs to node s % nodes; node (s + 1) % nodes reads it first.
inline plan::Ownership ownership_of(uint64_t samples, uint32_t nodes) {
  plan::Ownership o;
  for (uint64_t s = 0; s < samples; ++s) {
    o.owner.push_back(static_cast<uint32_t>(s % nodes));
    o.first_reader.push_back(static_cast<uint32_t>((s + 1) % nodes));
    o.first_access.push_back(s);
  }
  return o;
}

// One tier below `directory`, with room for all samples but those without a place.
inline std::shared_ptr<tier::NodeCache> cache_below(const std::filesystem::path& directory,
                                                    const std::string& job, tier::TierKind kind,
                                                    const std::vector<uint64_t>& sizes,
                                                    FileSystem* files = nullptr,
                                                    const std::set<uint64_t>& unplaced = {},
                                                    bool keep = false) {
  std::filesystem::create_directories(directory / "shm");
  plan::Placement placement;
  placement.fill.resize(1);
  uint64_t at = 0;
  for (uint64_t s = 0; s < sizes.size(); ++s) {
    const bool placed = !unplaced.contains(s);
    placement.tier.push_back(placed ? 0 : plan::kNoTier);
    placement.offset.push_back(placed ? at : 0);
    if (placed) at += sizes[s] + tier::record_overhead(kind);
  }
  placement.used = {at};
  tier::NodeCacheConfig c;
  c.job = job;
  c.dataset = 11;
  c.plan = 22;
  c.tiers = {{kind, at, (directory / "disk").string(), keep}};
  c.shm_directory = (directory / "shm").string();
  c.files = files;
  return tier::NodeCache::attach(c, sizes, tier::fixed(placement));
}

}  // namespace nostall::peer
