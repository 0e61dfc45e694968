// Real files in a folder that goes away with the test.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace nostall {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    char pattern[] = "/tmp/nostall-test-XXXXXX";
    if (!::mkdtemp(pattern)) throw std::runtime_error("cannot make a folder in /tmp");
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string write(const std::string& name, const std::string& content) const {
    const std::string path = (path_ / name).string();
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  std::string path(const std::string& name = {}) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

// Eight at a time, for sanitizers look at each access.
inline std::string random_bytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> words(size / 8 + 1);
  for (uint64_t& word : words) word = random();
  return {reinterpret_cast<const char*>(words.data()), size};
}

}  // namespace nostall
