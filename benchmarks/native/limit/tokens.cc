// nostall-limit-tokens: what this machine can do for a token loader with no loader at all. Threads
// read random windows of a file of 16-bit ids and widen them to 64 bits into batches; nothing is
// ordered, cached or shared.
//
//   nostall-limit-tokens FILE LENGTH BATCH THREADS SECONDS
//
// prints {"tokens_per_s"}: JSON, on one line.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/random.h"

namespace {

struct Work {
  int file;
  uint64_t windows, length, batch;
  int64_t until;
};

uint64_t read_windows(const Work& work, uint64_t seed) {
  nostall::SampleRandom random(seed, 0, 0);
  std::vector<uint16_t> stored(work.length);
  std::vector<int64_t> batch(work.length * work.batch);
  const size_t bytes = work.length * sizeof(uint16_t);
  uint64_t tokens = 0;
  while (nostall::now_ns() < work.until) {
    for (uint64_t row = 0; row < work.batch; ++row) {
      const uint64_t window = random.below(static_cast<uint32_t>(work.windows));
      if (pread(work.file, stored.data(), bytes, static_cast<off_t>(window * bytes)) !=
          static_cast<ssize_t>(bytes)) {
        throw std::runtime_error("the file cannot be read");
      }
      int64_t* out = batch.data() + row * work.length;
      for (uint64_t i = 0; i < work.length; ++i) out[i] = stored[i];
      // What nothing reads would not be written.
      asm volatile("" : : "r"(out) : "memory");
    }
    tokens += work.length * work.batch;
  }
  return tokens;
}

int measure(char** argv) {
  Work work{open(argv[1], O_RDONLY | O_CLOEXEC), 0, std::stoul(argv[2]), std::stoul(argv[3]), 0};
  struct stat status {};
  if (work.file < 0 || fstat(work.file, &status) != 0) throw std::runtime_error("no such file");
  work.windows = static_cast<uint64_t>(status.st_size) / (work.length * sizeof(uint16_t));
  if (work.windows == 0) throw std::runtime_error("the file is shorter than a window");
  const int64_t began = nostall::now_ns();
  work.until = began + static_cast<int64_t>(std::stod(argv[5]) * 1e9);
  std::atomic<uint64_t> tokens = 0;
  std::vector<std::jthread> threads;
  for (uint64_t t = 0; t < std::stoul(argv[4]); ++t) {
    threads.emplace_back([&work, &tokens, t] { tokens += read_windows(work, t); });
  }
  threads.clear();
  const double seconds = static_cast<double>(nostall::now_ns() - began) * 1e-9;
  std::cout << "{\"tokens_per_s\": " << static_cast<double>(tokens) / seconds << "}\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 6) throw std::runtime_error("usage: FILE LENGTH BATCH THREADS SECONDS");
  return measure(argv);
} catch (const std::exception& error) {
  std::cerr << "nostall-limit-tokens: " << error.what() << "\n";
  return 2;
}
