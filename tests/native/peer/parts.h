// What a node of a test is made of: a real tier, and which samples are its own.
#pragma once

#include <filesystem>
#include <memory>
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

// One tier below `directory`, with room for all samples.
inline std::shared_ptr<tier::NodeCache> cache_below(const std::filesystem::path& directory,
                                                    const std::string& job, tier::TierKind kind,
                                                    const std::vector<uint64_t>& sizes,
                                                    FileSystem* files = nullptr) {
  std::filesystem::create_directories(directory / "shm");
  plan::Placement placement;
  placement.fill.resize(1);
  uint64_t at = 0;
  for (const uint64_t size : sizes) {
    placement.tier.push_back(0);
    placement.offset.push_back(at);
    at += size + tier::record_overhead(kind);
  }
  placement.used = {at};
  tier::NodeCacheConfig c;
  c.job = job;
  c.dataset = 11;
  c.plan = 22;
  c.tiers = {{kind, at, (directory / "disk").string(), false}};
  c.shm_directory = (directory / "shm").string();
  c.files = files;
  return tier::NodeCache::attach(c, sizes, tier::fixed(placement));
}

}  // namespace nostall::peer
