#include "tier/names.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <vector>

#include "base/lock.h"

namespace nostall::tier {
namespace {

namespace fs = std::filesystem;

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

std::string prefix() { return "nostall-" + std::to_string(::getuid()) + "-"; }

std::vector<std::string> ours(const std::string& directory, const std::string& suffix) {
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with(prefix()) && name.ends_with(suffix)) found.push_back(it->path().string());
  }
  return found;
}

}  // namespace

Names shm_names(const std::string& directory, const std::string& job) {
  const std::string base = directory + "/" + prefix() + hex(hash_of(job));
  return {base + "-catalog", base + "-arena"};
}

std::string tier_file_name(const std::string& directory, const std::string& job, size_t tier) {
  return directory + "/" + prefix() + hex(hash_of(job)) + "-" + std::to_string(tier) + ".tier";
}

std::string kept_file_name(const std::string& directory, uint64_t dataset) {
  return directory + "/" + prefix() + hex(dataset) + "-kept.tier";
}

std::string manifest_name(const std::string& tier_file) { return tier_file + ".manifest"; }

void reclaim_shm(const std::string& directory) {
  for (const std::string& path : ours(directory, "-catalog")) {
    auto file = LockFile::open(path, false);
    if (!file) continue;
    LockFile& lock = file.value();
    if (!lock.try_lock(kSetUp, LockMode::exclusive) ||
        !lock.try_lock(kAlive, LockMode::exclusive) || !lock.is_current(path)) {
      continue;
    }
    const std::string arena = path.substr(0, path.size() - std::string("catalog").size()) + "arena";
    ::unlink(arena.c_str());
    ::unlink(path.c_str());
  }
}

void reclaim_tier_files(const std::string& directory) {
  for (const std::string& path : ours(directory, ".tier")) {
    std::error_code error;
    if (fs::exists(manifest_name(path), error)) continue;
    auto file = LockFile::open(path, false);
    if (file && file.value().try_lock(kAlive, LockMode::exclusive)) ::unlink(path.c_str());
  }
}

}  // namespace nostall::tier
