// nostall-limit-tokens: what this machine can do for a token loader with no loader at all. Threads
// read random windows of a file of 16-bit ids and widen them to 64 bits into batches; nothing is
// ordered, cached or shared. Packed, a window is read as random pieces, as long as the documents that
// the benchmark makes are on average, and has the number and the positions of each piece beside.
//
//   nostall-limit-tokens FILE LENGTH BATCH THREADS SECONDS windows|packed
//
// prints {"tokens_per_s", "cpu_ns"}, the last of a token: JSON, on one line.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/random.h"

namespace {

constexpr uint64_t kPiece = 739;  // tokens, the end of the document among them

struct Work {
  int file;
  uint64_t tokens, length, batch;
  int64_t until;
  bool packed;
};

// One sequence of the batch, `out` to `out + batch * length`, of ids; segments and positions behind.
void read_sequence(const Work& work, nostall::SampleRandom& random, std::vector<uint16_t>& stored,
                   int64_t* out) {
  const uint64_t most = work.packed ? kPiece : work.length;
  for (uint64_t done = 0, piece = 1; done < work.length; ++piece) {
    const uint64_t taken = std::min(most, work.length - done);
    const uint64_t from =
        work.packed ? random.below(static_cast<uint32_t>(work.tokens - taken))
                    : work.length * random.below(static_cast<uint32_t>(work.tokens / work.length));
    const size_t bytes = taken * sizeof(uint16_t);
    if (pread(work.file, stored.data(), bytes, static_cast<off_t>(from * sizeof(uint16_t))) !=
        static_cast<ssize_t>(bytes)) {
      throw std::runtime_error("the file cannot be read");
    }
    for (uint64_t i = 0; i < taken; ++i) out[done + i] = stored[i];
    if (work.packed) {
      int64_t* const segments = out + work.batch * work.length + done;
      int64_t* const positions = segments + work.batch * work.length;
      std::fill_n(segments, taken, static_cast<int64_t>(piece));
      std::iota(positions, positions + taken, int64_t{0});
    }
    done += taken;
  }
  // What nothing reads would not be written.
  asm volatile("" : : "r"(out) : "memory");
}

uint64_t read_batches(const Work& work, uint64_t seed) {
  nostall::SampleRandom random(seed, 0, 0);
  std::vector<uint16_t> stored(work.length);
  std::vector<int64_t> batch(work.length * work.batch * (work.packed ? 3 : 1));
  uint64_t tokens = 0;
  while (nostall::now_ns() < work.until) {
    for (uint64_t row = 0; row < work.batch; ++row) {
      read_sequence(work, random, stored, batch.data() + row * work.length);
    }
    tokens += work.length * work.batch;
  }
  return tokens;
}

int measure(char** argv) {
  const std::string mode = argv[6];
  if (mode != "windows" && mode != "packed") throw std::runtime_error("no mode " + mode);
  Work work{open(argv[1], O_RDONLY | O_CLOEXEC),
            0,
            std::stoul(argv[2]),
            std::stoul(argv[3]),
            0,
            mode == "packed"};
  struct stat status {};
  if (work.file < 0 || fstat(work.file, &status) != 0) throw std::runtime_error("no such file");
  work.tokens = static_cast<uint64_t>(status.st_size) / sizeof(uint16_t);
  if (work.tokens <= work.length) throw std::runtime_error("the file is shorter than a window");
  const int64_t began = nostall::now_ns();
  work.until = began + static_cast<int64_t>(std::stod(argv[5]) * 1e9);
  std::atomic<uint64_t> tokens = 0;
  std::vector<std::jthread> threads;
  for (uint64_t t = 0; t < std::stoul(argv[4]); ++t) {
    threads.emplace_back([&work, &tokens, t] { tokens += read_batches(work, t); });
  }
  threads.clear();
  const double seconds = static_cast<double>(nostall::now_ns() - began) * 1e-9;
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto cpu = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_usec) * 1e3;
  };
  const auto all = static_cast<double>(tokens);
  std::cout << "{\"tokens_per_s\": " << all / seconds
            << ", \"cpu_ns\": " << (cpu(used.ru_utime) + cpu(used.ru_stime)) / all << "}\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 7)
    throw std::runtime_error("usage: FILE LENGTH BATCH THREADS SECONDS windows|packed");
  return measure(argv);
} catch (const std::exception& error) {
  std::cerr << "nostall-limit-tokens: " << error.what() << "\n";
  return 2;
}
