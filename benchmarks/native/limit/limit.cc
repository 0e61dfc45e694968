// nostall-limit: what this machine can do with no loader at all. Threads take samples from a list
// one by one, open, read and close their files, decode a random region of a JPEG and write it,
// resampled, flipped and normalised, into float batches; nothing is ordered, cached, staged or
// shared. The decoding is its own plain libjpeg loop; the resampling kernels, and the decoder of
// masks, are the image room's.
//
//   nostall-limit LIST THREADS EPOCHS MODE [memory]
//
// With "memory" all files are read before the time begins, as a loader has them whose tiers hold the
// data, and none is opened after that.
//
// A line of the list has the paths of a sample's files, with tabs between them. The modes "read",
// "decode" and "transform" are for JPEG files; "mask" (a PNG of one channel and 8 bits), "boxes"
// (.npy, float32) and "text" for a JPEG file, transformed, and such a file beside it; "array" (.npy,
// numbers) and "wav" (PCM of 16 bits, one channel) for such files alone.
//
// prints {"samples_per_s", "cpu_ms_per_sample", "mode", "threads"}: JSON, on one line.
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

// jpeglib.h needs stdio.h before it.
#include <jpeglib.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <latch>
#include <memory>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/file.h"
#include "base/random.h"
#include "image/geometry.h"
#include "image/labels.h"
#include "image/resample.h"

namespace {

using nostall::image::Box;

constexpr int64_t kSide = 224, kBatch = 64;
constexpr int64_t kFrames = 48'000;
constexpr int64_t kMargin = 2;

enum class Mode { read, decode, transform, mask, boxes, text, array, wav };
constexpr std::string_view kModes[] = {"read",  "decode", "transform", "mask",
                                       "boxes", "text",   "array",     "wav"};

struct File {
  std::string path;
  std::vector<unsigned char> kept{};  // its bytes, with "memory"
};

// The bytes of a file, in memory that is used again, or where they are kept.
class Contents {
 public:
  void read(const File& from) {
    data_ = from.kept.data();
    size_ = from.kept.size();
    if (data_ != nullptr) return;
    const std::string& path = from.path;
    const nostall::Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status {};
    if (!file || fstat(file.get(), &status) != 0) throw std::runtime_error("cannot open " + path);
    size_ = static_cast<size_t>(status.st_size);
    if (bytes_.size() < size_) bytes_.resize(size_);
    if (pread(file.get(), bytes_.data(), size_, 0) != status.st_size) {
      throw std::runtime_error("cannot read " + path);
    }
    data_ = bytes_.data();
  }
  // The file behind its first `header` bytes, straight to where it belongs.
  template <typename Place>
  void read_into(const File& from, size_t header, Place&& place) {
    const std::string& path = from.path;
    if (!from.kept.empty()) {
      if (from.kept.size() < header) throw std::runtime_error(path + " is shorter than its header");
      data_ = from.kept.data();
      size_ = header;
      std::memcpy(place(from.kept.size() - header), data_ + header, from.kept.size() - header);
      return;
    }
    const nostall::Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status {};
    if (!file || fstat(file.get(), &status) != 0) throw std::runtime_error("cannot open " + path);
    const auto size = static_cast<size_t>(status.st_size);
    if (size < header) throw std::runtime_error(path + " is shorter than its header");
    size_ = header;
    if (bytes_.size() < header) bytes_.resize(header);
    data_ = bytes_.data();
    const iovec parts[2] = {{bytes_.data(), header}, {place(size - header), size - header}};
    if (preadv(file.get(), parts, 2, 0) != status.st_size) {
      throw std::runtime_error("cannot read " + path);
    }
  }
  const unsigned char* data() const { return data_; }
  size_t size() const { return size_; }
  // Behind a header of `bytes` bytes.
  const unsigned char* behind(size_t bytes) const {
    if (size_ < bytes) throw std::runtime_error("a file is shorter than its header");
    return data_ + bytes;
  }

 private:
  std::vector<unsigned char> bytes_;
  const unsigned char* data_ = nullptr;
  size_t size_ = 0;
};

// What was cut out of an image.
struct Cut {
  Box box;
  bool mirror = false;
};

// What lies beside an image, or stands alone.
class Companion {
 public:
  explicit Companion(Mode mode) : mode_(mode) {}

  void sample(const File& file, const Cut& cut) {
    place_ = filled_++ % kBatch;
    if (mode_ == Mode::array) return array(file);
    file_.read(file);
    if (mode_ == Mode::mask) mask(cut);
    if (mode_ == Mode::boxes) boxes(cut);
    if (mode_ == Mode::text) append(file_.data(), file_.size());
    if (mode_ == Mode::wav) sound();
  }

 private:
  void mask(const Cut& cut) {
    const auto labels = nostall::image::decode_labels(
        std::as_bytes(std::span(file_.data(), file_.size())), uint64_t{1} << 30, labels_);
    if (!labels || labels.value().wide) {
      throw std::runtime_error("a mask is no PNG of one channel and 8 bits");
    }
    const auto* values = reinterpret_cast<const uint8_t*>(labels.value().values);
    batch_.resize(kBatch * kSide * kSide * sizeof(int64_t));
    int64_t columns[kSide];
    for (int64_t x = 0; x < kSide; ++x) {
      const int64_t from = cut.mirror ? kSide - 1 - x : x;
      columns[x] = cut.box.x + from * cut.box.width / kSide;
    }
    auto* out = reinterpret_cast<int64_t*>(batch_.data()) + place_ * kSide * kSide;
    for (int64_t y = 0; y < kSide; ++y) {
      const uint8_t* row = values + (cut.box.y + y * cut.box.height / kSide) * labels.value().width;
      for (int64_t x = 0; x < kSide; ++x) *out++ = row[columns[x]];
    }
  }

  void boxes(const Cut& cut) {
    const unsigned char* values = file_.behind(header_of_array());
    const size_t rows = (file_.size() - header_of_array()) / (4 * sizeof(float));
    const float scale[2] = {static_cast<float>(kSide) / static_cast<float>(cut.box.width),
                            static_cast<float>(kSide) / static_cast<float>(cut.box.height)};
    const float origin[2] = {static_cast<float>(cut.box.x), static_cast<float>(cut.box.y)};
    for (size_t row = 0; row < rows; ++row) {
      float box[4];
      std::memcpy(box, values + row * sizeof box, sizeof box);
      for (size_t i = 0; i < 4; ++i) {
        box[i] = std::clamp((box[i] - origin[i % 2]) * scale[i % 2], 0.0f, float{kSide});
      }
      if (cut.mirror) {
        box[0] = std::exchange(box[2], kSide - box[0]);
        box[0] = kSide - box[0];
      }
      append(box, sizeof box);
    }
  }

  void array(const File& file) {
    constexpr size_t kHeader = 128;  // as NumPy writes it
    file_.read_into(file, kHeader, [this](size_t size) {
      batch_.resize(std::max(batch_.size(), kBatch * size));
      return batch_.data() + static_cast<size_t>(place_) * size;
    });
    if (header_of_array() != kHeader) throw std::runtime_error(file.path + " has a longer header");
  }

  void sound() {
    constexpr size_t kHeader = 44;
    const unsigned char* values = file_.behind(kHeader);
    const auto there = std::min<size_t>(kFrames, (file_.size() - kHeader) / sizeof(int16_t));
    batch_.resize(kBatch * kFrames * sizeof(float));
    float* out = reinterpret_cast<float*>(batch_.data()) + place_ * kFrames;
    for (size_t i = 0; i < there; ++i) {
      int16_t value;
      std::memcpy(&value, values + i * sizeof value, sizeof value);
      out[i] = static_cast<float>(value) / 32768.0f;
    }
    std::fill(out + there, out + kFrames, 0.0f);
  }

  // Of a .npy file of version 1: what stands in front of the values.
  size_t header_of_array() const {
    const unsigned char* begin = file_.behind(10);
    if (std::memcmp(begin - 10, "\x93NUMPY\1", 7) != 0) throw std::runtime_error("no .npy file");
    return 10 + (begin[-2] | size_t{begin[-1]} << 8);
  }

  void append(const void* from, size_t size) {
    if (place_ == 0) used_ = 0;
    batch_.resize(std::max(batch_.size(), used_ + size));
    std::memcpy(batch_.data() + used_, from, size);
    used_ += size;
  }

  Mode mode_;
  Contents file_;
  nostall::image::Buffer labels_;
  std::vector<unsigned char> batch_;
  int64_t filled_ = 0, place_ = 0;
  size_t used_ = 0;
};

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

  Cut sample(const File& file, uint32_t epoch, uint64_t index) {
    file_.read(file);
    if (mode_ == Mode::read) return {};
    nostall::SampleRandom random(0, epoch, index);
    jpeg_mem_src(&jpeg_, file_.data(), file_.size());
    jpeg_read_header(&jpeg_, TRUE);
    const nostall::image::RandomResizedCrop crop{kSide, kSide};
    const Box box = mode_ == Mode::decode
                        ? Box{0, 0, jpeg_.image_width, jpeg_.image_height}
                        : random_box(crop, jpeg_.image_width, jpeg_.image_height, random);
    decode(box);
    if (mode_ == Mode::decode) return {};
    const bool mirror = random.uniform() < 0.5;
    transform(box, mirror);
    return {box, mirror};
  }

 private:
  void decode(const Box& box) {
    shrink_ = 0;
    while (shrink_ < 3 && mode_ != Mode::decode &&
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
  Contents file_;
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

std::vector<std::vector<File>> listed(const std::string& path, size_t files) {
  std::vector<std::vector<File>> samples;
  std::ifstream list(path);
  for (std::string line; std::getline(list, line);) {
    if (line.empty()) continue;
    std::istringstream parts(line);
    std::vector<File>& sample = samples.emplace_back();
    for (std::string part; std::getline(parts, part, '\t');) sample.push_back({part});
    if (sample.size() != files) {
      throw std::runtime_error("a line of " + path + " has not " + std::to_string(files) +
                               " paths: " + line);
    }
  }
  if (samples.empty()) throw std::runtime_error("no path in " + path);
  return samples;
}

int measure(const std::vector<std::string>& arguments) {
  const unsigned threads = number("THREADS", arguments[1]), epochs = number("EPOCHS", arguments[2]);
  const std::string& name = arguments[3];
  const auto known = std::find(std::begin(kModes), std::end(kModes), name);
  if (known == std::end(kModes)) throw std::runtime_error("there is no mode " + name);
  const auto mode = static_cast<Mode>(known - std::begin(kModes));
  const bool alone = mode >= Mode::array, beside = mode >= Mode::mask && !alone;
  std::vector<std::vector<File>> samples = listed(arguments[0], beside ? 2 : 1);
  for (size_t i = 0; arguments.size() > 4 && i < samples.size(); ++i) {
    for (File& file : samples[i]) {
      Contents contents;
      contents.read(file);
      file.kept.assign(contents.data(), contents.data() + contents.size());
    }
  }

  const uint64_t total = uint64_t{epochs} * samples.size();
  std::atomic<uint64_t> warmed{0}, next{0};
  std::atomic<int64_t> cpu{0}, begin{0};
  std::vector<std::string> failures(threads);
  std::latch warm(threads);
  std::vector<std::thread> workers;
  for (unsigned t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      bool arrived = false;
      int64_t before = 0;
      try {
        Worker worker(mode);
        Companion companion(mode);
        const auto make = [&](uint64_t i) {
          const std::vector<File>& files = samples[i % samples.size()];
          Cut cut;
          if (!alone) cut = worker.sample(files[0], static_cast<uint32_t>(i / samples.size()), i);
          if (alone || beside) companion.sample(files.back(), cut);
        };
        // As of loaders, a first epoch touches all memory before the time begins.
        for (uint64_t i = warmed++; i < samples.size(); i = warmed++) make(i);
        arrived = true;
        warm.arrive_and_wait();
        int64_t none = 0;
        begin.compare_exchange_strong(none, nostall::now_ns());
        before = nostall::thread_cpu_ns();
        for (uint64_t i = next++; i < total; i = next++) make(i);
      } catch (const std::exception& error) {
        failures[t] = error.what();
        if (!arrived) warm.count_down();
      }
      cpu += nostall::thread_cpu_ns() - before;
    });
  }
  for (std::thread& worker : workers) worker.join();
  const double seconds = static_cast<double>(nostall::now_ns() - begin) * 1e-9;
  for (const std::string& failure : failures) {
    if (!failure.empty()) throw std::runtime_error(failure);
  }
  const auto done = static_cast<double>(total);
  std::cout << "{\"samples_per_s\": " << done / seconds
            << ", \"cpu_ms_per_sample\": " << static_cast<double>(cpu) * 1e-6 / done
            << ", \"mode\": \"" << name << "\", \"threads\": " << threads << "}\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 5 && (argc != 6 || std::string_view(argv[5]) != "memory")) {
    std::string modes;
    for (const std::string_view mode : kModes)
      modes += (modes.empty() ? "" : "|") + std::string(mode);
    throw std::runtime_error("usage: LIST THREADS EPOCHS " + modes + " [memory]");
  }
  return measure(std::vector<std::string>(argv + 1, argv + argc));
} catch (const std::exception& error) {
  std::cerr << "nostall-limit: " << error.what() << "\n";
  return 2;
}
