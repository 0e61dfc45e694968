// The pipeline over a source in memory that can be slow, broken or bad on command.
#include "stage/loader.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "../closed_memory.h"
#include "../readers.h"
#include "../refuse.h"
#include "../temporary.h"
#include "base/activity.h"
#include "base/log.h"
#include "source/folder.h"
#include "source/scan.h"
#include "source/stopping.h"

namespace nostall::stage {
namespace {

using namespace std::chrono_literals;

// Sample i is i % 50 + 1 bytes long, all of value i % 251.
class MemorySource : public source::Source {
 public:
  explicit MemorySource(uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      sizes_.push_back(i % 50 + 1);
      labels_.push_back(static_cast<int64_t>(i * 3));
      total_ += sizes_.back();
    }
  }
  uint64_t size() const override { return sizes_.size(); }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return labels_; }
  uint64_t total_bytes() const override { return total_; }
  uint64_t fingerprint() const override { return 42; }
  bool is_local() const override { return local; }
  std::string describe(uint64_t sample) const override {
    return "memory:" + std::to_string(sample);
  }
  std::unique_ptr<source::Reader> make_reader(source::ReaderKind, unsigned) const override {
    return std::make_unique<MemoryReader>(*this);
  }

  uint32_t fields() const override {
    if (late.valid()) late.wait();
    return 2;
  }

  void pretend(uint64_t sample, uint64_t size) { sizes_[sample] = size; }

  bool local = true;
  std::set<uint64_t> broken;
  int error = EIO;  // of those
  int error_of_others = 0;
  std::chrono::microseconds delay{0};
  std::function<void()> before_read;
  std::shared_future<void> late;  // what threads wait for when they start
  mutable std::atomic<uint64_t> reads{0};

 private:
  class MemoryReader : public source::Reader {
   public:
    explicit MemoryReader(const MemorySource& source) : source_(source) {}
    void read(std::span<source::ReadRequest> requests) override {
      if (source_.delay.count() > 0) std::this_thread::sleep_for(source_.delay);
      if (source_.before_read) source_.before_read();
      for (auto& r : requests) {
        ++source_.reads;
        ASSERT_EQ(r.into.size(), source_.sizes_[r.sample]);
        r.error = source_.broken.contains(r.sample) ? source_.error : source_.error_of_others;
        std::memset(r.into.data(), static_cast<int>(r.sample % 251), r.into.size());
      }
    }
    std::string_view name() const override { return "memory"; }

   private:
    const MemorySource& source_;
  };

  std::vector<uint64_t> sizes_;
  std::vector<int64_t> labels_;
  uint64_t total_ = 0;
};

LoaderConfig config_for(std::shared_ptr<MemorySource> source, uint64_t batch, uint32_t epochs) {
  LoaderConfig config;
  config.job.samples = source->size();
  config.job.global_batch = batch;
  config.job.epochs = epochs;
  config.job.seed = 7;
  config.source = std::move(source);
  config.staging_bytes = 4096;
  return config;
}

std::unique_ptr<Batch> must_have(Loader& loader) {
  auto batch = loader.next(60s);
  EXPECT_NE(batch, nullptr);
  return batch;
}

// How many samples were read once no more are, and `least` at the least.
uint64_t reads_at_rest(const MemorySource& source, uint64_t least) {
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  uint64_t before = 0;
  do {
    before = source.reads;
    std::this_thread::sleep_for(200ms);
  } while ((source.reads <= least || source.reads != before) &&
           std::chrono::steady_clock::now() < deadline);
  return source.reads;
}

TEST(Loader, HandsOutThePlanWithTheRightBytes) {
  const auto source = std::make_shared<MemorySource>(103);
  Loader loader(config_for(source, 10, 3));
  for (uint32_t e = 0; e < 3; ++e) {
    const auto order = plan::epoch_order(loader.config().job, e);
    for (uint64_t h = 0; h < loader.batches_per_epoch(); ++h) {
      const auto batch = must_have(loader);
      EXPECT_EQ(batch->position, (Position{e, h}));
      for (size_t i = 0; i < batch->samples.size(); ++i) {
        const uint64_t s = order[h * 10 + i];
        ASSERT_EQ(batch->samples[i], s);
        ASSERT_EQ(batch->labels[i], static_cast<int64_t>(s * 3));
        ASSERT_EQ(batch->lengths[i], s % 50 + 1);
        for (uint64_t k = 0; k < batch->lengths[i]; ++k) {
          ASSERT_EQ(batch->buffer->data()[batch->offsets[i] + k], std::byte(s % 251));
        }
      }
    }
  }
  EXPECT_EQ(source->reads, 3u * 103u);
  EXPECT_THROW(loader.next(1s), Error);
}

std::shared_ptr<const fields::Program> bytes_and_label() {
  fields::Field bytes, label;
  bytes.kind = fields::Bytes{};
  label.name = "label";
  label.kind = fields::Scalar{};
  label.index = 1;
  return std::make_shared<const fields::Program>(fields::Program::compile({bytes, label}));
}

// Numbers are unpacked by the thread that read them, many batches at a time.
TEST(Loader, HandsOutNumbersWithinAnyStage) {
  const auto source = std::make_shared<MemorySource>(103);
  for (uint64_t s = 0; s < source->size(); ++s) source->pretend(s, 8);
  source->broken = {40};
  fields::Field number;
  number.name = "number";
  number.kind = fields::Scalar{};
  LoaderConfig config = config_for(source, 10, 20);
  config.program = std::make_shared<const fields::Program>(fields::Program::compile({number}));
  config.on_error = OnError::substitute;
  config.fetchers = 4;
  for (const uint64_t staging : {160u, 4096u, 1u << 20}) {
    config.staging_bytes = staging;
    config.depth = staging == 4096 ? 3 : 16;
    Loader loader(config);
    uint64_t substituted = 0;
    for (uint64_t h = 0; h < 20 * loader.batches_per_epoch(); ++h) {
      const auto batch = must_have(loader);
      ASSERT_EQ(batch->position, (Position{static_cast<uint32_t>(h / 11), h % 11}));
      for (size_t i = 0; i < batch->samples.size(); ++i) {
        ASSERT_NE(batch->samples[i], 40u);
        int64_t value = 0, expected = 0;
        std::memcpy(&value, batch->buffer->data() + 8 * i, 8);
        std::memset(&expected, static_cast<int>(batch->samples[i] % 251), 8);
        ASSERT_EQ(value, expected);
      }
      const OriginCount& read = batch->origins[size_t(Origin::source)];
      ASSERT_EQ(read.samples, batch->samples.size());
      ASSERT_EQ(read.bytes, 8 * (read.samples - batch->substitutions.size()));
      substituted += batch->substitutions.size();
    }
    EXPECT_EQ(substituted, 20u);
    EXPECT_LE(loader.memory().staging, std::max<uint64_t>(staging, 200) + 100);
  }
  config.on_error = OnError::raise;
  Loader loader(config);
  const auto order = plan::epoch_order(config.job, 0);
  const auto bad = static_cast<uint64_t>(std::find(order.begin(), order.end(), 40) - order.begin());
  for (uint64_t h = 0; h < bad / 10; ++h) must_have(loader);
  try {
    loader.next(60s);
    ADD_FAILURE() << "the broken sample was handed out";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("memory:40"), std::string::npos) << e.what();
  }
}

// The one fetch thread reads nothing before the consumer has read something.
TEST(Loader, TheConsumerReadsWhatItWouldWaitFor) {
  const auto source = std::make_shared<MemorySource>(100);
  for (uint64_t s = 0; s < source->size(); ++s) source->pretend(s, 8);
  const auto consumer = std::this_thread::get_id();
  std::promise<void> helped;
  std::once_flag first;
  source->before_read = [&, done = helped.get_future().share()] {
    if (std::this_thread::get_id() == consumer) {
      std::call_once(first, [&] { helped.set_value(); });
    } else {
      done.wait_for(20s);  // where it fails
    }
  };
  fields::Field number;
  number.name = "number";
  number.kind = fields::Scalar{};
  LoaderConfig config = config_for(source, 10, 3);
  config.program = std::make_shared<const fields::Program>(fields::Program::compile({number}));
  config.fetchers = 1;
  config.expected_source = 1e-6;  // a batch at once
  {
    Loader loader(config);
    for (uint64_t h = 0; h < 30; ++h) {
      const auto batch = must_have(loader);
      ASSERT_EQ(batch->position, (Position{static_cast<uint32_t>(h / 10), h % 10}));
      ASSERT_EQ(batch->origins[size_t(Origin::source)].samples, 10u);
      for (size_t i = 0; i < batch->samples.size(); ++i) {
        ASSERT_EQ(batch->buffer->data()[8 * i + 7], std::byte(batch->samples[i] % 251));
      }
    }
    EXPECT_EQ(source->reads, 300u);
  }
  std::atomic<uint64_t> by_others{0}, by_consumer{0};
  const auto notice = [&] { ++(std::this_thread::get_id() == consumer ? by_consumer : by_others); };
  source->before_read = notice;
  // The consumer does not run what may be code of a user's, which may use the loader.
  source->local = false;
  {
    Loader loader(config);
    for (uint64_t h = 0; h < 30; ++h) must_have(loader);
  }
  EXPECT_GT(by_others.exchange(0), 0u);
  source->local = true;
  // Nor does it take memory of others, or read what goes into it.
  std::atomic<uint64_t> taken{0};
  config.batch_memory = [&](size_t bytes) {
    notice();
    ++taken;
    return take_from_heap(bytes);
  };
  Loader loader(config);
  for (uint64_t h = 0; h < 30; ++h) must_have(loader);
  EXPECT_GT(taken, 0u);
  EXPECT_GT(by_others, taken);
  EXPECT_EQ(by_consumer, 0u);
  EXPECT_EQ(source->reads, 900u);
}

TEST(Buffer, LargeMemoryGoesBackToTheSystem) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  for (int i = 0; i < 8; ++i) {  // malloc learns from the first ones
    std::shared_ptr<std::byte> memory = take_from_heap(size_t{8} << 20);
    std::byte* const at = memory.get();
    memory.get()[(size_t{8} << 20) - 1] = std::byte{1};
    ASSERT_EQ(reinterpret_cast<uintptr_t>(at) % 64, 0u);
    memory.reset();
    unsigned char there = 0;
    EXPECT_EQ(::mincore(at - reinterpret_cast<uintptr_t>(at) % page, page, &there), -1);
    EXPECT_EQ(errno, ENOMEM);
  }
}

TEST(Buffer, AFreeOneIsTakenOnce) {
  const auto pool = std::make_shared<BufferPool>(1 << 20);
  EXPECT_EQ(pool->take_free(1000), nullptr);
  pool->take(1000).reset();
  const auto taken = pool->take_free(900);
  ASSERT_NE(taken, nullptr);
  EXPECT_EQ(taken->capacity(), 1000u);
  EXPECT_EQ(pool->take_free(900), nullptr);
  EXPECT_EQ(pool->bytes(), 1000u);
}

// Batches of four samples, the longer ones of which make the zeros more than is staged.
class PaddedBatches : public testing::Test {
 protected:
  static constexpr uint64_t kSamples = 8, kMiB = uint64_t{1} << 20;
  static constexpr uint64_t kMachine = 1024 * kMiB, kReserve = kMachine / 8;

  void SetUp() override {
    std::filesystem::create_directories(folder_.path("proc/self"));
    for (uint64_t s = 0; s < kSamples; ++s) source_->pretend(s, 1 + s * kMiB);
    available(kMachine / 2);
  }
  void available(uint64_t bytes) const {
    std::ofstream(folder_.path("proc/meminfo"))
        << "MemTotal: " << kMachine / 1024 << " kB\nMemAvailable: " << bytes / 1024 << " kB\n";
  }
  LoaderConfig config() const {
    fields::Field bytes;
    bytes.kind = fields::Bytes{};
    bytes.padded = true;
    LoaderConfig config = config_for(source_, 4, 1);
    config.program = std::make_shared<const fields::Program>(fields::Program::compile({bytes}));
    config.proc_directory = folder_.path("proc");
    return config;
  }

  const TemporaryFolder folder_;
  const std::shared_ptr<MemorySource> source_ = std::make_shared<MemorySource>(kSamples);
};

// Tiers need a moment until they have given the reserve back.
TEST_F(PaddedBatches, TakeHalfOfTheReserveAtTheMost) {
  const auto first = [this] {
    Loader loader(config());
    return must_have(loader)->tail->capacity();
  };
  const uint64_t bytes = first();
  available(bytes + kReserve / 2 + 1024);
  EXPECT_EQ(first(), bytes);
  available(bytes + kReserve / 2 - 1024);
  try {
    first();
    ADD_FAILURE() << "it used what is left to others";
  } catch (const Error& e) {
    EXPECT_EQ(e.error_number(), ENOMEM);
    EXPECT_NE(std::string(e.what()).find("MemAvailable"), std::string::npos) << e.what();
  }
}

TEST_F(PaddedBatches, SayWhatOthersOfTheLoaderHave) {
  LoaderConfig c = config();
  c.batch_memory = [this](size_t bytes) {
    available(kReserve / 2);
    return take_from_heap(bytes);
  };
  Loader loader(c);
  std::string said;
  try {  // either may be made first
    const auto first = must_have(loader), second = must_have(loader);
  } catch (const Error& e) {
    said = e.what();
  }
  EXPECT_NE(said.find("other batches of this loader have "), std::string::npos) << said;
}

// While no limit counts yet what one batch was given, none is looked at for another.
TEST_F(PaddedBatches, TakeMemoryOneAfterTheOther) {
  LoaderConfig c = config();
  c.fetchers = c.workers = 4;
  std::mutex mutex;
  std::condition_variable another;
  std::vector<std::pair<std::shared_ptr<std::byte>, size_t>> given;
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  size_t untouched = 0;  // pages
  c.batch_memory = [&](size_t bytes) {
    void* mapped =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const std::shared_ptr<std::byte> memory(static_cast<std::byte*>(mapped),
                                            [bytes](std::byte* p) { ::munmap(p, bytes); });
    std::unique_lock lock(mutex);
    for (const auto& [earlier, size] : given) {
      std::vector<unsigned char> there((size + page - 1) / page);
      EXPECT_EQ(::mincore(earlier.get(), size, there.data()), 0);
      untouched += static_cast<size_t>(std::count(there.begin(), there.end(), 0));
    }
    given.emplace_back(memory, bytes);
    another.notify_all();
    // Time for another thread to come here, which it must not.
    another.wait_for(lock, 500ms, [&] { return given.size() > 1; });
    return memory;
  };
  Loader loader(c);
  for (uint64_t h = 0; h < kSamples / 4; ++h) must_have(loader);
  EXPECT_EQ(given.size(), kSamples / 4);
  EXPECT_EQ(untouched, 0u);
}

// Memory of a device may take long to get, and its function may need threads that use the loader.
TEST(Loader, AnswersWhileMemoryOfABatchIsTaken) {
  std::promise<void> asked, answered;
  LoaderConfig config = config_for(std::make_shared<MemorySource>(40), 40, 1);
  config.program = bytes_and_label();
  config.workers = 1;
  std::once_flag first;
  config.batch_memory = [&](size_t bytes) {
    std::call_once(first, [&] {
      asked.set_value();
      answered.get_future().wait();
    });
    return take_from_heap(bytes);
  };
  Loader loader(config);
  EXPECT_EQ(loader.next(0s), nullptr);  // starts it
  asked.get_future().wait();
  EXPECT_EQ(loader.next(1ms), nullptr);
  answered.set_value();
  EXPECT_EQ(must_have(loader)->samples.size(), 40u);
}

TEST(Loader, HandsOutRaggedFieldsWithinItsBounds) {
  constexpr uint64_t kSamples = 20000, kBatch = 100, kStaging = 256 << 10;
  // What is staged at once, the consumer's batch, and what pooled buffers are larger than the little
  // that is in them. Batches that were counted by their slabs alone would take twice as much.
  constexpr uint64_t kBound = kStaging + kStaging / 2;
  const auto source = std::make_shared<MemorySource>(kSamples);
  source->broken = {17};
  LoaderConfig config = config_for(source, kBatch, 1);
  config.program = bytes_and_label();
  config.on_error = OnError::substitute;
  config.staging_bytes = kStaging;
  Loader loader(config);
  std::unique_ptr<Batch> batch = must_have(loader);
  // Fetching goes far ahead, so that the transform threads are held up by the bounds alone. They
  // have a moment to break them.
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (source->reads < 16000 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(1ms);
  }
  for (int i = 0; i < 300 && loader.memory().staging <= kBound; ++i) {
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_LE(loader.memory().staging, kBound);
  uint64_t replaced = 0;
  for (uint64_t h = 0; h < kSamples / kBatch; ++h) {
    if (h > 0) batch = must_have(loader);
    const auto* offsets =
        reinterpret_cast<const int64_t*>(batch->tail->data() + batch->laid[0].counts);
    const auto* labels = reinterpret_cast<const int64_t*>(batch->buffer->data());
    replaced += batch->substitutions.size();
    for (size_t i = 0; i < kBatch; ++i) {
      const uint64_t s = batch->samples[i];
      ASSERT_EQ(labels[i], static_cast<int64_t>(s * 3));
      ASSERT_EQ(static_cast<uint64_t>(offsets[i + 1] - offsets[i]), s % 50 + 1);
      for (int64_t k = offsets[i]; k < offsets[i + 1]; ++k) {
        ASSERT_EQ(batch->tail->data()[k], std::byte(s % 251));
      }
    }
  }
  EXPECT_EQ(replaced, 1u);
}

TEST(Loader, CountsWhatABatchTakesBesideItsContents) {
  // A consumer that computes, and records of which 10,000 would be staged if these alone counted.
  constexpr uint64_t kStaging = 256 << 10;
  const auto source = std::make_shared<MemorySource>(10000);
  LoaderConfig config = config_for(source, 1, 100);
  config.staging_bytes = kStaging;
  Loader loader(config);
  const size_t before = mallinfo2().uordblks;
  must_have(loader);
  EXPECT_GT(reads_at_rest(*source, 50), 50u);
  // Beside it lie the plan of this part of the job and of the next, and the loader's threads.
  EXPECT_LT(mallinfo2().uordblks - before, kStaging + (1u << 20));
}

TEST(Loader, StagesFewBatchesWhateverTheirMemory) {
  const auto source = std::make_shared<MemorySource>(40000);
  LoaderConfig config = config_for(source, 1, 1);
  config.staging_bytes = uint64_t{1} << 40;
  Loader loader(config);
  must_have(loader);
  EXPECT_LE(reads_at_rest(*source, 16384), 16384u + 1);
}

TEST(Loader, GoesOnWhereTheSystemGivesNoMoreThreads) {
  const auto source = std::make_shared<MemorySource>(100);
  source->before_read = [refused = false]() mutable {
    if (!std::exchange(refused, true)) refuse(kThreadCalls, EAGAIN);
  };
  LoaderConfig config = config_for(source, 10, 6);
  config.fetchers = 1;
  Loader loader(config);
  for (uint32_t e = 0; e < 6; ++e) {
    const auto order = plan::epoch_order(loader.config().job, e);
    for (uint64_t h = 0; h < loader.batches_per_epoch(); ++h) {
      const auto batch = must_have(loader);
      for (size_t i = 0; i < 10; ++i) ASSERT_EQ(batch->samples[i], order[h * 10 + i]);
    }
  }
}

TEST(Loader, TellsOfAThreadThatTheSystemRefusesToAnother) {
  const auto source = std::make_shared<MemorySource>(100);
  source->before_read = [] {
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  };
  Loader loader(config_for(source, 10, 1));
  try {
    loader.next(60s);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::io);
    EXPECT_NE(std::string(error.what()).find("raise the limit"), std::string::npos);
  }
}

TEST(Loader, GoesOnWithoutThreadsThatAreLate) {
  std::promise<void> start;
  const auto source = std::make_shared<MemorySource>(103);
  source->late = start.get_future().share();
  LoaderConfig config = config_for(source, 10, 1);
  config.start_limit = 1ms;
  Loader loader(config);
  EXPECT_EQ(loader.next(1ms), nullptr);
  start.set_value();
  EXPECT_EQ(must_have(loader)->samples.size(), 10u);
}

TEST(Loader, StaysInsideItsStagingBuffer) {
  const auto source = std::make_shared<MemorySource>(10000);
  Loader loader(config_for(source, 10, 1));  // about 255 bytes a batch: 16 batches
  must_have(loader);
  std::this_thread::sleep_for(50ms);
  EXPECT_LE(source->reads, 10u * 18u);
  EXPECT_LE(loader.memory().staging, 18u * 500u);
}

TEST(Loader, SeeksAndStopsAtAnyTime) {
  const auto source = std::make_shared<MemorySource>(500);
  source->delay = 200us;
  Loader loader(config_for(source, 8, 4));
  for (uint64_t i = 0; i < 40; ++i) {
    const Position to{static_cast<uint32_t>(i % 4), i % loader.batches_per_epoch()};
    loader.seek(to);
    if (i % 3 != 0) {
      EXPECT_EQ(must_have(loader)->position, to);
    }
  }
  loader.close();
  EXPECT_THROW(loader.next(1s), Error);
}

// Its records take as long to unpack as `unpacking` says.
class SlowToUnpack : public MemorySource {
 public:
  using MemorySource::MemorySource;
  Result<std::monostate> locate(uint64_t sample, std::span<const std::byte> record,
                                std::span<source::FieldBytes> out) const override {
    ++unpacked;
    unpacking();
    return MemorySource::locate(sample, record, out);
  }

  std::function<void()> unpacking;
  mutable std::atomic<uint64_t> unpacked{0};
};

TEST(Loader, ClosesWithoutUnpackingWhatItHasRead) {
  constexpr uint64_t kRead = 200, kWorkers = 2;
  const auto source = std::make_shared<SlowToUnpack>(1000);
  std::promise<void> ahead, closing;
  source->unpacking = [closes = closing.get_future().share()] { closes.wait(); };
  std::once_flag once;
  source->before_read = [&] {
    if (source->reads < kRead) return;
    std::call_once(once, [&] {
      ahead.set_value();
      while (!source::stop_of_reads().stop_requested()) std::this_thread::sleep_for(1ms);
      closing.set_value();
    });
  };
  LoaderConfig config = config_for(source, 10, 1);
  config.program = bytes_and_label();
  config.workers = kWorkers;
  config.fetchers = 1;
  config.staging_bytes = 1 << 20;
  Loader loader(config);
  EXPECT_EQ(loader.next(0s), nullptr);  // starts it
  ahead.get_future().wait();
  loader.close();
  EXPECT_LE(source->unpacked, kWorkers);
}

// Its readers work on two samples at a time, and call `making` for each.
class MadeOneByOne : public MemorySource {
 public:
  using MemorySource::MemorySource;
  uint32_t made_at_once() const override { return 2; }
  std::unique_ptr<source::Reader> make_reader(source::ReaderKind kind,
                                              unsigned depth) const override {
    return std::make_unique<Maker>(*this, MemorySource::make_reader(kind, depth));
  }

  std::function<void()> making = [] {};
  mutable std::atomic<size_t> most{0};  // in one read

 private:
  class Maker : public source::Reader {
   public:
    Maker(const MadeOneByOne& source, std::unique_ptr<source::Reader> reader)
        : source_(source), reader_(std::move(reader)) {}
    void read(std::span<source::ReadRequest> requests) override {
      source_.most = std::max<size_t>(source_.most, requests.size());
      for (source::ReadRequest& r : requests) {
        source_.making();
        reader_->read({&r, 1});
      }
    }
    std::string_view name() const override { return reader_->name(); }

   private:
    const MadeOneByOne& source_;
    std::unique_ptr<source::Reader> reader_;
  };
};

TEST(Loader, HandsOutWhatIsMadeOneByOneBeforeItsWholeChunk) {
  const auto source = std::make_shared<MadeOneByOne>(1000);
  source->making = [&] {
    if (source->reads < 2) return;
    while (!source::stop_of_reads().stop_requested()) std::this_thread::sleep_for(1ms);
  };
  LoaderConfig config = config_for(source, 2, 1);
  config.fetchers = 1;
  config.depth = 16;
  Loader loader(config);
  must_have(loader);
  loader.close();
  EXPECT_LE(source->reads, 6u);  // and the part that the stop met
}

TEST(Loader, ReadsChunksOfWhatIsMadeQuickly) {
  const auto source = std::make_shared<MadeOneByOne>(1000);
  LoaderConfig config = config_for(source, 16, 4);
  config.fetchers = 1;
  config.depth = 16;
  config.staging_bytes = 1 << 20;
  Loader loader(config);
  for (uint64_t h = 0; h < 4 * loader.batches_per_epoch(); ++h) must_have(loader);
  EXPECT_EQ(source->most, 16u);
}

TEST(Loader, TimesOutWhenTheSourceIsSlow) {
  const auto source = std::make_shared<MemorySource>(100);
  std::promise<void> answer;
  source->before_read = [answered = answer.get_future().share()] { answered.wait(); };
  Loader loader(config_for(source, 8, 1));
  EXPECT_EQ(loader.next(1ms), nullptr);
  answer.set_value();
  EXPECT_NE(loader.next(60s), nullptr);
}

// A full stage is quiet, so that background work may run, until a batch is taken and read anew.
TEST(Loader, IsQuietWhileItsStageIsFull) {
  const auto source = std::make_shared<MemorySource>(2000);
  std::promise<void> answer;
  source->before_read = [answered = answer.get_future().share()] { answered.wait(); };
  Loader loader(config_for(source, 100, 1));
  EXPECT_EQ(loader.next(1ns), nullptr);
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  const auto wait_for = [&](bool quiet, std::chrono::nanoseconds since) {
    while (Activity::quiet(since) != quiet) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(1ms);
    }
    return true;
  };
  EXPECT_TRUE(wait_for(false, 0s));
  answer.set_value();
  EXPECT_TRUE(wait_for(true, 50ms));
  EXPECT_LT(source->reads, 2000u);
  EXPECT_NE(loader.next(60s), nullptr);
}

TEST(Loader, NamesTheSampleThatCannotBeRead) {
  const auto source = std::make_shared<MemorySource>(20);
  source->broken = {13};
  Loader loader(config_for(source, 20, 1));
  for (int i = 0; i < 2; ++i) {
    try {
      loader.next(60s);
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::corruption);
      EXPECT_NE(std::string(e.what()).find("memory:13"), std::string::npos) << e.what();
    }
  }
}

TEST(Loader, ReadsAgainWhatWasRepaired) {
  for (const bool images : {false, true}) {
    const auto source = std::make_shared<MemorySource>(20);
    source->broken = {13};
    LoaderConfig config = config_for(source, 20, 2);
    if (images) config.program = bytes_and_label();
    Loader loader(config);
    loader.seek({1, 0});
    EXPECT_THROW(loader.next(60s), Error);
    loader.seek({1, 0});
    EXPECT_THROW(loader.next(60s), Error);
    source->broken.clear();
    EXPECT_THROW(loader.next(60s), Error);
    loader.seek({1, 0});
    EXPECT_EQ(must_have(loader)->position, (Position{1, 0}));
  }
}

TEST(Loader, SubstitutesTheSameSampleEveryTime) {
  const auto source = std::make_shared<MemorySource>(200);
  source->broken = {113};
  std::set<uint64_t> replacements;
  for (const uint64_t batch_size : {7u, 50u}) {
    LoaderConfig config = config_for(source, batch_size, 3);
    config.on_error = OnError::substitute;
    Loader loader(std::move(config));
    size_t substitutions = 0;
    for (uint64_t b = 0; b < 3 * loader.batches_per_epoch(); ++b) {
      const auto batch = must_have(loader);
      for (const auto& s : batch->substitutions) {
        EXPECT_EQ(s.sample, 113u);
        replacements.insert(s.replacement);
        ++substitutions;
      }
      for (const uint64_t s : batch->samples) EXPECT_NE(s, 113u);
    }
    EXPECT_EQ(substitutions, 3u);
  }
  EXPECT_EQ(replacements.size(), 1u);
}

std::shared_ptr<const fields::Program> small_images() {
  const std::vector<image::Step> steps{image::Resize{8, 8}};
  return std::make_shared<const fields::Program>(
      fields::Program::of_image(image::Pipeline::compile(steps)));
}

// A system call into memory that a device has closed fails, whatever the file is like.
TEST(Loader, MemoryThatCannotBeWrittenIsNoFaultOfTheFile) {
  for (const OnError policy : {OnError::raise, OnError::substitute}) {
    for (const bool images : {false, true}) {
      const auto source = std::make_shared<MemorySource>(20);
      for (uint64_t i = 0; i < 20; ++i) source->broken.insert(i);
      source->error = EFAULT;
      LoaderConfig config = config_for(source, 4, 1);
      config.on_error = policy;
      if (images) config.program = small_images();
      Loader loader(std::move(config));
      try {
        loader.next(60s);
        FAIL() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::io);
        const std::string what = error.what();
        EXPECT_NE(what.find("memory of the loader cannot be written (Bad address)"),
                  std::string::npos)
            << what;
        EXPECT_EQ(what.find("repair"), std::string::npos) << what;
      }
    }
  }
}

// Another process, which has more, would train on other samples.
TEST(Loader, WhatTheProcessLacksIsNoFaultOfTheFile) {
  for (const int lacking : {EMFILE, ENFILE, ENOMEM}) {
    for (const bool images : {false, true}) {
      for (const bool of_stand_ins : {false, true}) {
        const auto source = std::make_shared<MemorySource>(20);
        LoaderConfig config = config_for(source, 1, 1);
        source->broken = {plan::epoch_order(config.job, 0)[0]};
        source->error = of_stand_ins ? EIO : lacking;
        source->error_of_others = of_stand_ins ? lacking : 0;
        config.on_error = OnError::substitute;
        if (images) config.program = bytes_and_label();
        Loader loader(std::move(config));
        try {
          loader.next(60s);
          FAIL() << "no error";
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::io);
          EXPECT_EQ(error.error_number(), lacking);
          const std::string what = error.what();
          EXPECT_NE(what.find("the file is not at fault"), std::string::npos) << what;
          EXPECT_NE(what.find("ulimit"), std::string::npos) << what;
        }
      }
    }
  }
}

// The same, of real files and closed pages: bytes are read into the batch, whoever reads them.
TEST(Loader, PagesThatAreClosedAreNoFaultOfTheFile) {
  const TemporaryFolder folder;
  for (int i = 0; i < 20; ++i) folder.write(std::to_string(i), std::string(9000, 'x'));
  source::ScanOptions plain;
  plain.class_per_folder = false;
  for (const source::ReaderKind kind : source::reader_kinds()) {
    LoaderConfig config = config_for(std::make_shared<MemorySource>(20), 4, 1);
    config.source = std::make_shared<source::FolderSource>(
        folder.path(), source::scan_folder(folder.path(), plain));
    config.reader = kind;
    config.batch_memory = [](size_t bytes) {
      const auto closed = std::make_shared<ClosedMemory>(0, bytes / 4096 + 1);
      return std::shared_ptr<std::byte>(closed, closed->all().data());
    };
    Loader loader(std::move(config));
    try {
      loader.next(60s);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.error_number(), EFAULT);
      EXPECT_NE(std::string(error.what()).find("the file is not at fault"), std::string::npos);
    }
  }
}

TEST(Loader, RefusesAPlanForAnotherSource) {
  LoaderConfig config = config_for(std::make_shared<MemorySource>(20), 4, 1);
  config.job.samples = 21;
  EXPECT_THROW(Loader loader(std::move(config)), Error);
}

// Its readers cannot be made, as io_uring's cannot where the kernel forbids it.
class NoReaderSource : public MemorySource {
 public:
  using MemorySource::MemorySource;
  std::unique_ptr<source::Reader> make_reader(source::ReaderKind, unsigned) const override {
    throw Error(ErrorKind::usage, "no reader here");
  }
};

TEST(Loader, WhatAThreadThrowsNextThrows) {
  Loader loader(config_for(std::make_shared<NoReaderSource>(10), 5, 1));
  for (int again = 0; again < 2; ++again) {
    try {
      loader.next(60s);
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage);
      EXPECT_STREQ(e.what(), "no reader here");
    }
  }
}

TEST(Loader, ASampleBeyondMemoryIsABadSample) {
  for (const bool raw : {true, false}) {
    const auto source = std::make_shared<MemorySource>(1);
    source->pretend(0, uint64_t{1} << 63);
    LoaderConfig config = config_for(source, 1, 1);
    if (!raw) config.program = small_images();
    Loader loader(config);
    EXPECT_THROW(loader.next(60s), Error) << raw;
    EXPECT_EQ(source->reads, 0u);
  }
}

plan::Placement in_the_first_tier(const source::Source& source) {
  plan::Placement placement;
  placement.tier.assign(source.size(), 0);
  placement.used = {0};
  for (const uint64_t size : source.sizes()) {
    placement.offset.push_back(placement.used[0]);
    placement.used[0] += size;
  }
  placement.fill.resize(1);
  return placement;
}

class NoSharedMemory : public FileSystem {
 public:
  int allocate(int, uint64_t, uint64_t) override { return -ENOSPC; }
};

TEST(Loader, ATierWithoutMemoryDoesNotOverdrawTheReadBuffers) {
  const TemporaryFolder shm;
  set_log_sink([](LogLevel, const std::string&) {});
  const auto source = std::make_shared<MemorySource>(5000);
  NoSharedMemory full;
  tier::NodeCacheConfig node;
  node.job = "no memory";
  node.dataset = source->fingerprint();
  node.tiers = {{tier::TierKind::ram, source->total_bytes(), "", false}};
  node.shm_directory = shm.path();
  node.files = &full;
  {
    LoaderConfig config = config_for(source, 5000, 1);
    config.cache =
        tier::NodeCache::attach(node, source->sizes(), tier::fixed(in_the_first_tier(*source)));
    config.program = small_images();
    config.job.global_batch = 10;
    config.staging_bytes = 1;
    config.io_bytes = 1000;
    Loader loader(config);
    // The bytes are no images: the first batch fails, while fetching goes on ahead.
    EXPECT_THROW(loader.next(60s), Error);
    std::this_thread::sleep_for(100ms);
    // The budget, what two threads take at once, and as much again that waits in the pool.
    EXPECT_LE(loader.memory().io_buffers, 1000u + 2 * 16 * 50 + 1000);
  }
  set_log_sink({});
  EXPECT_TRUE(std::filesystem::is_empty(shm.path()));
}

TEST(Loader, TheBatchThatIsWaitedForStaysWithinTheReadBuffersToo) {
  constexpr uint64_t kSamples = 400, kSize = 1000, kThreads = 5;
  // A sample for each thread, where fewer fit.
  for (const auto& [fit, most] : {std::pair<uint64_t, uint64_t>{20, 20}, {2, kThreads}}) {
    const auto source = std::make_shared<SlowToUnpack>(kSamples);
    for (uint64_t s = 0; s < kSamples; ++s) source->pretend(s, kSize);
    std::promise<void> go_on;
    source->unpacking = [going = go_on.get_future().share()] { going.wait(); };
    LoaderConfig config = config_for(source, kSamples, 1);
    config.program = bytes_and_label();
    config.fetchers = 2;
    config.workers = kThreads - 2;
    config.depth = 4;
    config.staging_bytes = 1 << 20;
    config.io_bytes = fit * kSize;
    Loader loader(config);
    EXPECT_EQ(loader.next(0s), nullptr);  // starts it
    EXPECT_EQ(reads_at_rest(*source, most - 1), most);
    EXPECT_EQ(loader.next(0s), nullptr);
    go_on.set_value();
    EXPECT_EQ(must_have(loader)->samples.size(), kSamples);
    EXPECT_EQ(source->reads, kSamples);
  }
}

// Where there is no memory for what is read ahead, the run ends, and others may claim the sample.
TEST(Loader, AClaimEndsWithTheRun) {
  const TemporaryFolder folder;
  const auto source = std::make_shared<MemorySource>(2);
  source->pretend(0, uint64_t{1} << 62);
  std::promise<void> failed;
  source->before_read = [reading = failed.get_future().share()] { reading.wait(); };
  tier::NodeCacheConfig node;
  node.job = "ahead";
  node.dataset = source->fingerprint();
  node.tiers = {{tier::TierKind::file, uint64_t{1} << 63, folder.path(), false}};
  node.shm_directory = folder.path();  // or another process that runs this has the same cache
  plan::Placement placement;
  placement.tier = {0, plan::kNoTier};
  placement.offset = {0, 0};
  placement.used = {1000};
  placement.fill.resize(1);
  LoaderConfig config = config_for(source, 1, 1);
  config.job.order = plan::OrderKind::user;
  config.job.user_order =
      std::make_shared<const std::vector<plan::SampleId>>(std::vector<plan::SampleId>{1});
  config.cache = tier::NodeCache::attach(node, source->sizes(), tier::fixed(placement));
  config.ahead = {{0}};
  {
    Loader loader(config);
    EXPECT_THROW(loader.next(60s), Error);
    failed.set_value();
  }
  EXPECT_EQ(config.cache->state(0), tier::State::empty);
}

// The same of what a batch needs.
TEST(Loader, AClaimOfABatchEndsWithTheRun) {
  for (const tier::TierKind kind : {tier::TierKind::ram, tier::TierKind::file}) {
    const TemporaryFolder folder;
    const auto source = std::make_shared<MemorySource>(2);
    std::atomic<bool> fails{true};
    source->before_read = [&] {
      if (fails) throw std::bad_alloc();
    };
    tier::NodeCacheConfig node;
    node.job = "needed";
    node.dataset = source->fingerprint();
    node.tiers = {{kind, 1000, folder.path(), false}};
    node.shm_directory = folder.path();
    plan::Placement placement;
    placement.tier = {0, 0};
    placement.offset = {0, 500};
    placement.used = {1000};
    placement.fill.resize(1);
    LoaderConfig config = config_for(source, 2, 1);
    config.cache = tier::NodeCache::attach(node, source->sizes(), tier::fixed(placement));
    {
      Loader loader(config);
      EXPECT_THROW(loader.next(60s), Error);
    }
    for (const uint64_t s : {0, 1}) EXPECT_EQ(config.cache->state(s), tier::State::empty);
    fails = false;
    {
      Loader loader(config);
      must_have(loader);
    }
    for (const uint64_t s : {0, 1}) EXPECT_EQ(config.cache->state(s), tier::State::ready);
  }
}

// The first piece of memory is refused, and none after it.
class NoMemoryAtFirst final : public FileSystem {
 public:
  int allocate(int fd, uint64_t offset, uint64_t size) override {
    return refused_.exchange(true) ? FileSystem::allocate(fd, offset, size) : -ENOSPC;
  }

 private:
  std::atomic<bool> refused_{false};
};

// In which one depends on when the thread that gives back what is there of that piece has its turn.
TEST(Loader, WhatATierHadNoMemoryForIsKeptInALaterEpoch) {
  const TemporaryFolder shm;
  set_log_sink([](LogLevel, const std::string&) {});
  const auto source = std::make_shared<MemorySource>(100);
  NoMemoryAtFirst files;
  tier::NodeCacheConfig node;
  node.job = "no memory at first";
  node.dataset = source->fingerprint();
  node.tiers = {{tier::TierKind::ram, source->total_bytes(), "", false}};
  node.shm_directory = shm.path();
  node.files = &files;
  LoaderConfig config = config_for(source, 10, 1u << 20);
  // Far less than an epoch: a read of the first one is over before the third one begins.
  config.staging_bytes = 250;
  config.cache =
      tier::NodeCache::attach(node, source->sizes(), tier::fixed(in_the_first_tier(*source)));
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  uint64_t from_tier = 0, epochs = 0;
  {
    Loader loader(config);
    for (; from_tier < 100 && std::chrono::steady_clock::now() < deadline; ++epochs) {
      from_tier = 0;
      for (int i = 0; i < 10; ++i) {
        const auto batch = loader.next(60s);
        ASSERT_NE(batch, nullptr);
        from_tier += batch->origins[size_t(Origin::ram)].samples;
      }
    }
  }
  EXPECT_EQ(from_tier, 100u);
  EXPECT_GT(epochs, 1u);
  config.cache.reset();
  set_log_sink({});
  EXPECT_TRUE(std::filesystem::is_empty(shm.path()));
}

TEST(Loader, ASampleTwiceInAChunkIsNotWaitedForByTheThreadThatReadsIt) {
  const TemporaryFolder shm;
  const auto source = std::make_shared<MemorySource>(1);
  tier::NodeCacheConfig node;
  node.job = "twice";
  node.local_world = 2;
  node.dataset = source->fingerprint();
  node.tiers = {{tier::TierKind::ram, source->total_bytes(), "", false}};
  node.shm_directory = shm.path();
  plan::Placement placement;
  placement.tier = {0};
  placement.offset = {0};
  placement.used = {source->total_bytes()};
  placement.fill.resize(1);
  {
    LoaderConfig config = config_for(source, 3, 1);
    config.job.order = plan::OrderKind::user;
    config.job.user_order =
        std::make_shared<const std::vector<plan::SampleId>>(std::vector<plan::SampleId>{0, 0, 0});
    config.cache =
        tier::NodeCache::attach(node, source->sizes(), tier::fixed(in_the_first_tier(*source)));
    node.local_rank = 1;
    const auto other =
        tier::NodeCache::attach(node, source->sizes(), tier::fixed(in_the_first_tier(*source)));
    ASSERT_TRUE(other->claim(0));
    Loader loader(config);
    EXPECT_EQ(loader.next(100ms), nullptr);
    other->abandon(0);
    EXPECT_NE(loader.next(60s), nullptr);
    EXPECT_EQ(source->reads, 1u);
  }
  EXPECT_TRUE(std::filesystem::is_empty(shm.path()));
}

class NoArena : public FileSystem {
 public:
  int truncate(int, uint64_t) override { return -ENOSPC; }
};

// Two ranks of a node that share the halves of a RAM tier; the first one never moves to its second
// chunk.
class BesideARankThatStops : public testing::Test {
 protected:
  void SetUp() override {
    set_log_sink([this](LogLevel, const std::string& message) {
      const std::scoped_lock lock(mutex_);
      told_.push_back(message);
    });
  }
  void TearDown() override {
    set_log_sink({});
    EXPECT_TRUE(std::filesystem::is_empty(shm_.path()));
  }

  LoaderConfig rank(uint32_t rank, FileSystem* files = nullptr) {
    const auto source = std::make_shared<MemorySource>(240);
    LoaderConfig config = config_for(source, 8, 4);
    config.rank = config.local_rank = rank;
    config.job.world = config.local_world = 2;
    config.job.order = plan::OrderKind::sub_batch;
    config.job.sub_batches = {2, 5, 1};
    const uint64_t room = source->total_bytes() / 4;
    config.chunks = std::make_shared<const plan::Chunks>(config.job, 0, 2, source->sizes());
    config.half = config.chunks->shape(room, 0);
    tier::NodeCacheConfig node;
    node.job = "a rank that stops";
    node.local_rank = rank;
    node.local_world = 2;
    node.dataset = source->fingerprint();
    node.tiers = {{tier::TierKind::ram, room, "", false}};
    node.halves = {0, config.half};
    node.shm_directory = shm_.path();
    node.files = files;
    plan::Placement placement;
    placement.tier.assign(source->size(), plan::kNoTier);
    placement.offset.assign(source->size(), 0);
    placement.used = {0};
    placement.fill.resize(1);
    config.cache = tier::NodeCache::attach(node, source->sizes(), tier::fixed(placement));
    return config;
  }

  // All batches that are left; false if one is late or not the plan's.
  static bool go_on(Loader& loader) {
    const LoaderConfig& config = loader.config();
    for (Position at = loader.position(); at.epoch < 4; at = loader.position()) {
      const plan::RankEpoch mine = plan::rank_epoch(config.job, at.epoch, config.rank);
      const uint64_t begin = at.batch == 0 ? 0 : mine.batch_ends[at.batch - 1];
      const auto batch = must_have(loader);
      if (!batch || batch->position != at) return false;
      for (size_t i = 0; i < batch->samples.size(); ++i) {
        if (batch->samples[i] != mine.samples[begin + i]) return false;
        const std::byte* bytes = batch->buffer->data() + batch->offsets[i];
        for (uint64_t k = 0; k < batch->lengths[i]; ++k) {
          if (bytes[k] != std::byte(batch->samples[i] % 251)) return false;
        }
      }
    }
    return true;
  }

  uint64_t times_told(const std::string& words) {
    const std::scoped_lock lock(mutex_);
    return static_cast<uint64_t>(std::count_if(told_.begin(), told_.end(), [&](const auto& m) {
      return m.find(words) != std::string::npos;
    }));
  }

  const TemporaryFolder shm_;
  std::mutex mutex_;
  std::vector<std::string> told_;
};

TEST_F(BesideARankThatStops, TheOtherOneGoesOnAfterAWhile) {
  LoaderConfig first = rank(0), second = rank(1);
  ASSERT_GT(first.half.places, 0u);
  second.local_patience = 100ms;
  Loader stopped(first), goes_on(second);
  ASSERT_NE(must_have(stopped), nullptr);
  EXPECT_TRUE(go_on(goes_on));
  // It waited once, for all that came after.
  EXPECT_EQ(times_told("another rank of this node is so far behind"), 1u);
  EXPECT_TRUE(go_on(stopped));
  EXPECT_EQ(times_told("another rank of this node"), 1u);
}

TEST_F(BesideARankThatStops, NobodyWaitsForHalvesOfATierWithoutMemory) {
  NoArena files;
  LoaderConfig first = rank(0, &files), second = rank(1, &files);
  second.local_patience = 24h;
  Loader stopped(first), goes_on(second);
  ASSERT_NE(must_have(stopped), nullptr);
  EXPECT_TRUE(go_on(goes_on));
  EXPECT_TRUE(go_on(stopped));
  EXPECT_EQ(times_told("there is no RAM tier"), 1u);
  EXPECT_EQ(times_told("another rank of this node"), 0u);
}

}  // namespace
}  // namespace nostall::stage
