// tier/names.h - what the files of kept tiers are called, and the clearing of abandoned ones.
//
// All else of a node's cache has no name (base/handover.h).
#pragma once

#include <cstdint>
#include <string>

#include "base/own.h"

namespace nostall::tier {

// Kept tiers lie in `<directory of the tier>/nostall-<uid>`, which only its user may enter, as
// <data set>.tier with a manifest beside each.
std::string kept_directory(const std::string& tier_directory);
std::string kept_file_name(const std::string& tier_directory, uint64_t dataset);
std::string manifest_name(const std::string& tier_file);

// Byte ranges of the lock protocol. In the catalogue: a member holds kAlive shared, and each rank
// its own byte exclusively; the one that gives memory back holds kEasing until none of it is under way,
// and the first one that has warned of it kEasingTold. Kept tier files: kAlive exclusively, by the job
// that uses it.
inline constexpr uint64_t kAlive = (uint64_t{1} << 61) + 1;
inline constexpr uint64_t kEasing = (uint64_t{1} << 61) + 2;
inline constexpr uint64_t kEasingTold = (uint64_t{1} << 61) + 3;
inline constexpr uint64_t kFirstMember = (uint64_t{1} << 61) + 16;

// Removes the kept tier files without a manifest that no live process holds, and warns of one that
// it cannot remove. `directory` is open as `at`.
void reclaim_kept_files(const std::string& directory, const Descriptor& at, FileSystem& files);

}  // namespace nostall::tier
