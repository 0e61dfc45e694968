// Paths of kept tiers, and the removal of tier files without a manifest: only such that no process
// has locked, checked again under the lock.
#include "tier/names.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <vector>

#include "base/lock.h"
#include "base/log.h"

namespace nostall::tier {
namespace {

constexpr const char* kSuffix = ".tier";

}  // namespace

std::string kept_directory(const std::string& tier_directory) {
  return tier_directory + "/nostall-" + std::to_string(::geteuid());
}

std::string kept_file_name(const std::string& tier_directory, uint64_t dataset) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(dataset));
  return kept_directory(tier_directory) + "/" + text + kSuffix;
}

std::string manifest_name(const std::string& tier_file) { return tier_file + ".manifest"; }

void reclaim_kept_files(const std::string& directory, const Descriptor& at, FileSystem& files) {
  namespace fs = std::filesystem;
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string path = it->path().string();
    std::error_code unknown;  // whether it is there: the tier stays
    const bool kept = !path.ends_with(kSuffix) || fs::exists(manifest_name(path), unknown);
    if (!kept && !unknown) found.push_back(path);
  }
  for (const std::string& path : found) {
    const auto file = open_own(path, O_RDWR, at.get());
    if (!file) continue;
    LockFile lock(file.value(), files);
    // A job that made it meanwhile locks it before writing, and checks that it still has its name.
    if (lock.try_lock(kAlive, LockMode::exclusive) == Locked::yes &&
        lock.is_current(path, at.get())) {
      const int failed = -files.unlink(path, at.get());
      if (failed != 0 && failed != ENOENT) {
        log(LogLevel::warning, io_error("cannot remove the abandoned tier", path, failed).what());
      }
    }
  }
}

}  // namespace nostall::tier
