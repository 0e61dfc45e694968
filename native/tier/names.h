// tier/names.h - what the files of a node's cache are called, and the clearing of abandoned ones.
#pragma once

#include <cstdint>
#include <string>

namespace nostall::tier {

struct Names {
  std::string catalog, arena;
};

// In `directory` (shared memory): nostall-<uid>-<hash of job>-catalog and -arena.
Names shm_names(const std::string& directory, const std::string& job);
// In a tier's directory: nostall-<uid>-<hash of job>-<tier>.tier, or, kept, by data set.
std::string tier_file_name(const std::string& directory, const std::string& job, size_t tier);
std::string kept_file_name(const std::string& directory, uint64_t dataset);
std::string manifest_name(const std::string& tier_file);

// Byte ranges of the lock protocol. In the catalogue: one process at a time sets up, joins or
// leaves; a member holds kAlive shared; and each rank its own byte exclusively. Tier files: kAlive
// shared.
inline constexpr uint64_t kSetUp = uint64_t{1} << 61;
inline constexpr uint64_t kAlive = kSetUp + 1;
inline constexpr uint64_t kFirstMember = kSetUp + 16;

// Removes catalogues and arenas that no live process holds.
void reclaim_shm(const std::string& directory);
// Removes tier files that no live process holds and no manifest keeps.
void reclaim_tier_files(const std::string& directory);

}  // namespace nostall::tier
