// nostall-limit: what this machine can do with no loader at all. Threads take JPEG files from a
// list one by one, open, read and close them, decode a random region and write it, resampled,
// flipped and normalised, into float batches; nothing is ordered, cached, staged or shared.
// The decoding is its own plain libjpeg loop; the resampling kernels are the image room's.
//
//   nostall-limit LIST THREADS EPOCHS read|decode|transform
// prints {"samples_per_s", "cpu_ms_per_sample", "mode", "threads"}: JSON, on one line.
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

// jpeglib.h needs stdio.h before it.
#include <jpeglib.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/file.h"
#include "base/random.h"
#include "image/geometry.h"
#include "image/resample.h"

namespace {

using nostall::image::Box;

constexpr int64_t kSide = 224, kBatch = 64;
constexpr int64_t kMargin = 2;

enum class Mode { read, decode, transform };

class Worker {
 public:
  explicit Worker(Mode mode) : mode_(mode), batch_(kBatch * 3 * kSide * kSide) {
    jpeg_.err = jpeg_std_error(&errors_);
    errors_.error_exit = [](j_common_ptr jpeg) {
      char message[JMSG_LENGTH_MAX];
      jpeg->err->format_message(jpeg, message);
      // No exception may cross the C library.
      std::cerr << "nostall-limit: " << message << "\n";
      std::_Exit(2);
    };
    jpeg_create_decompress(&jpeg_);
  }
  ~Worker() { jpeg_destroy_decompress(&jpeg_); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void sample(const std::string& path, uint32_t epoch, uint64_t index) {
    read(path);
    if (mode_ == Mode::read) return;
    nostall::SampleRandom random(0, epoch, index);
    jpeg_mem_src(&jpeg_, bytes_.data(), size_);
    jpeg_read_header(&jpeg_, TRUE);
    const nostall::image::RandomResizedCrop crop{kSide, kSide};
    const Box box = mode_ == Mode::decode
                        ? Box{0, 0, jpeg_.image_width, jpeg_.image_height}
                        : random_box(crop, jpeg_.image_width, jpeg_.image_height, random);
    decode(box);
    if (mode_ == Mode::transform) transform(box, random.uniform() < 0.5);
  }

 private:
  void read(const std::string& path) {
    const nostall::Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status {};
    if (!file || fstat(file.get(), &status) != 0) throw std::runtime_error("cannot open " + path);
    size_ = static_cast<size_t>(status.st_size);
    if (bytes_.size() < size_) bytes_.resize(size_);
    if (pread(file.get(), bytes_.data(), size_, 0) != status.st_size) {
      throw std::runtime_error("cannot read " + path);
    }
  }

  void decode(const Box& box) {
    shrink_ = 0;
    while (shrink_ < 3 && mode_ == Mode::transform &&
           std::min(box.width, box.height) >> (shrink_ + 1) >= 2 * kSide) {
      ++shrink_;
    }
    jpeg_.out_color_space = JCS_EXT_RGBX;
    jpeg_.scale_num = 1;
    jpeg_.scale_denom = 1u << shrink_;
    jpeg_start_decompress(&jpeg_);
    const auto down = [this](int64_t at) {
      return std::max<int64_t>(0, (at >> shrink_) - kMargin);
    };
    const auto up = [this](int64_t at, int64_t limit) {
      return std::min(limit, (at >> shrink_) + 1 + kMargin);
    };
    auto x = static_cast<JDIMENSION>(down(box.x));
    auto width = static_cast<JDIMENSION>(up(box.x + box.width, jpeg_.output_width)) - x;
    if (width < jpeg_.output_width) jpeg_crop_scanline(&jpeg_, &x, &width);
    x_ = x;
    width_ = width;
    y_ = down(box.y);
    height_ = up(box.y + box.height, jpeg_.output_height) - y_;
    if (y_ > 0) jpeg_skip_scanlines(&jpeg_, static_cast<JDIMENSION>(y_));
    uint8_t* pixels = decoded_.reserve(static_cast<size_t>(width_ * height_ * 4));
    for (int64_t row = 0; row < height_;) {
      JSAMPROW to = pixels + row * width_ * 4;
      row += jpeg_read_scanlines(&jpeg_, &to, 1);
    }
    jpeg_abort_decompress(&jpeg_);
  }

  void transform(const Box& box, bool mirror) {
    const double unit = 1 << shrink_;
    const auto edge = [unit](int64_t at) { return static_cast<double>(at) / unit; };
    h_.prepare(edge(box.x), edge(box.x + box.width), kSide, 0, kSide, x_, width_);
    v_.prepare(edge(box.y), edge(box.y + box.height), kSide, 0, kSide, y_, height_);
    const auto& kernel = nostall::image::kernels();
    uint8_t* pixels = decoded_.reserve(0);
    uint8_t* narrow = narrow_.reserve(static_cast<size_t>(height_ * kSide * 4));
    for (int64_t y = 0; y < height_; y += 2) {
      const int64_t next = std::min(y + 1, height_ - 1);
      kernel.horizontal(h_, pixels + y * width_ * 4, pixels + next * width_ * 4,
                        narrow + y * kSide * 4, narrow + next * kSide * 4);
    }
    constexpr float kScale[3] = {1 / 58.395f, 1 / 57.12f, 1 / 57.375f};
    constexpr float kOffset[3] = {-123.675f / 58.395f, -116.28f / 57.12f, -103.53f / 57.375f};
    float* image = batch_.data() + (filled_++ % kBatch) * 3 * kSide * kSide;
    uint8_t row[kSide * 4];
    for (int64_t y = 0; y < kSide; ++y) {
      const auto i = static_cast<size_t>(y);
      const int32_t taps = (v_.count[i] + 1) / 2 * 2;
      rows_.resize(static_cast<size_t>(taps));
      for (int32_t tap = 0; tap < taps; ++tap) {
        const int64_t from = v_.first[i] + std::min(tap, v_.count[i] - 1);
        rows_[static_cast<size_t>(tap)] = narrow + from * kSide * 4;
      }
      kernel.vertical(rows_.data(), &v_.weights[i * static_cast<size_t>(v_.taps)], taps, row,
                      sizeof row);
      float* planes[3];
      for (int64_t c = 0; c < 3; ++c) planes[c] = image + (c * kSide + y) * kSide;
      kernel.planes_f32(row, kSide, mirror, kScale, kOffset, planes);
    }
  }

  Mode mode_;
  std::vector<float> batch_;
  int64_t filled_ = 0;
  std::vector<unsigned char> bytes_;
  size_t size_ = 0;
  jpeg_decompress_struct jpeg_{};
  jpeg_error_mgr errors_{};
  unsigned shrink_ = 0;
  int64_t x_ = 0, y_ = 0, width_ = 0, height_ = 0;
  nostall::image::Buffer decoded_, narrow_;
  nostall::image::Filter h_, v_;
  std::vector<const uint8_t*> rows_;
};

unsigned number(const char* name, const std::string& text) {
  unsigned value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value == 0) {
    throw std::runtime_error(std::string(name) + " " + text + " must be a positive number");
  }
  return value;
}

int measure(const std::vector<std::string>& arguments) {
  const unsigned threads = number("THREADS", arguments[1]), epochs = number("EPOCHS", arguments[2]);
  const std::string& name = arguments[3];
  if (name != "read" && name != "decode" && name != "transform") {
    throw std::runtime_error("mode " + name + " is none of read, decode, transform");
  }
  const Mode mode = name == "read" ? Mode::read : name == "decode" ? Mode::decode : Mode::transform;
  std::vector<std::string> paths;
  std::ifstream list(arguments[0]);
  for (std::string line; std::getline(list, line);) {
    if (!line.empty()) paths.push_back(line);
  }
  if (paths.empty()) throw std::runtime_error("no path in " + arguments[0]);

  const uint64_t total = uint64_t{epochs} * paths.size();
  std::atomic<uint64_t> next{0};
  std::atomic<int64_t> cpu{0};
  std::vector<std::string> failures(threads);
  const int64_t begin = nostall::now_ns();
  std::vector<std::thread> workers;
  for (unsigned t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      try {
        Worker worker(mode);
        for (uint64_t i = next++; i < total; i = next++) {
          worker.sample(paths[i % paths.size()], static_cast<uint32_t>(i / paths.size()), i);
        }
      } catch (const std::exception& error) {
        failures[t] = error.what();
      }
      cpu += nostall::thread_cpu_ns();
    });
  }
  for (std::thread& worker : workers) worker.join();
  const double seconds = static_cast<double>(nostall::now_ns() - begin) * 1e-9;
  for (const std::string& failure : failures) {
    if (!failure.empty()) throw std::runtime_error(failure);
  }
  const auto samples = static_cast<double>(total);
  std::cout << "{\"samples_per_s\": " << samples / seconds
            << ", \"cpu_ms_per_sample\": " << static_cast<double>(cpu) * 1e-6 / samples
            << ", \"mode\": \"" << name << "\", \"threads\": " << threads << "}\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 5) throw std::runtime_error("usage: LIST THREADS EPOCHS read|decode|transform");
  return measure(std::vector<std::string>(argv + 1, argv + argc));
} catch (const std::exception& error) {
  std::cerr << "nostall-limit: " << error.what() << "\n";
  return 2;
}
