// Checks the configuration, and starts a Run at the first next() and after every seek.
#include "stage/loader.h"

#include <unistd.h>

#include <algorithm>

#include "stage/run.h"

namespace nostall::stage {
namespace {

// Throws Error(usage) if the configuration cannot work.
void check(const LoaderConfig& config) {
  plan::validate(config.job);
  if (!config.source) throw Error(ErrorKind::usage, "a loader needs a source");
  if (config.job.samples != config.source->size()) {
    throw Error(ErrorKind::usage, "the plan is for " + std::to_string(config.job.samples) +
                                      " samples, but the source has " +
                                      std::to_string(config.source->size()));
  }
  if (config.rank >= config.job.world) {
    throw Error(ErrorKind::usage, "rank " + std::to_string(config.rank) +
                                      " is not below the world size " +
                                      std::to_string(config.job.world));
  }
  if (config.on_error == OnError::report && config.program) {
    throw Error(ErrorKind::usage, "only batches of raw bytes can report bad samples");
  }
  for (size_t i = 0; config.program && i < config.program->fields().size(); ++i) {
    const fields::Field& field = config.program->fields()[i];
    if (field.index >= config.source->fields()) {
      throw Error(ErrorKind::usage, "field " + field.name + " is number " +
                                        std::to_string(field.index) + " of a source of " +
                                        std::to_string(config.source->fields()) + " fields");
    }
  }
  if (config.depth == 0) throw Error(ErrorKind::usage, "depth must be at least 1");
}

}  // namespace

LoaderConfig attach(LoaderConfig config, const NodeSpec& node, peer::ExchangeConfig peers,
                    std::unique_ptr<peer::Transport> transport) {
  check(config);
  config.local_rank = node.local_rank;
  config.local_world = node.local_world;
  if (config.cache) return config;  // shared with others
  if (config.locality && config.sharing == Sharing::hdmlp) {
    throw Error(ErrorKind::usage,
                "assignment=\"locality\" deals samples to their owners, and with sharing=\"hdmlp\" "
                "they have none: leave one of them out");
  }
  if (config.locality && config.job.scheme == plan::Scheme::whole) {
    throw Error(ErrorKind::usage,
                "assignment=\"locality\" deals the samples of a batch to ranks, and with "
                "scheme=\"whole\" each rank takes them all: leave one of them out");
  }
  if (config.copies == plan::CopyRule::next_use &&
      (config.locality || config.sharing == Sharing::hdmlp)) {
    throw Error(
        ErrorKind::usage,
        "copies=\"next-use\" follows the order of the plan and the owners of samples, which "
        "assignment=\"locality\" and sharing=\"hdmlp\" change: leave one of them out");
  }
  NodeSpec here = node;
  here.copies = config.copies;
  here.locality = config.locality;
  NodeTiers tiers = attach_node_cache(config.job, config.rank, *config.source, here, config.sharing,
                                      config.begin);
  config.cache = tiers.cache;
  config.chunks = tiers.chunks;
  config.half = tiers.half;
  config.places = std::move(tiers.places);
  if (transport && config.cache) {
    peers.rank = config.rank;
    peers.node_of_rank = node.nodes.of_rank;
    peers.plan = tiers.plan;
    peers.epoch_length = std::max<uint64_t>(1, plan::epoch_length(config.job));
    if (config.sharing == Sharing::hdmlp) {
      peers.guess =
          std::make_shared<peer::Guess>(std::move(tiers.copies), tiers.fill, config.cache);
      config.ahead = std::move(tiers.fill);
    }
    config.peers = std::make_shared<peer::Exchange>(std::move(transport), std::move(peers),
                                                    std::move(tiers.ownership),
                                                    config.source->sizes(), config.cache);
    if (config.sharing == Sharing::owners_read) {
      const std::span<const uint64_t> owned = config.peers->owned();
      config.ahead.emplace_back(owned.begin(), owned.end());
    }
  }
  return config;
}

Loader::Loader(LoaderConfig config)
    : config_(std::move(config)),
      batch_pool_(std::make_shared<BufferPool>(
          config_.keep_bytes > 0 ? config_.keep_bytes : config_.staging_bytes,
          config_.batch_memory)),
      raw_pool_(std::make_shared<BufferPool>(config_.io_bytes)),
      speeds_(config_.peers ? config_.peers->nodes() : 0),
      owner_pid_(::getpid()) {
  check(config_);
  for (size_t t = 0; t < std::min(config_.expected_tiers.size(), Speeds::kTiers); ++t) {
    speeds_.tiers[t].expect(config_.expected_tiers[t]);
  }
  for (SpeedEstimate& node : speeds_.nodes) node.expect(config_.expected_peer);
  speeds_.source.expect(config_.expected_source);
}

Loader::~Loader() {
  if (::getpid() != owner_pid_) {
    // In a forked child the threads do not exist: joining them would wait for ever.
    [[maybe_unused]] Run* lost = run_.release();
    [[maybe_unused]] CopyPlan* deciding = copy_plan_.release();
    [[maybe_unused]] auto* kept =
        std::make_unique<std::shared_ptr<peer::Exchange>>(config_.peers).release();
  }
}

void Loader::refuse_child() const {
  if (::getpid() == owner_pid_) return;
  throw Error(ErrorKind::usage, "this loader belongs to process " + std::to_string(owner_pid_) +
                                    "; a forked child must make its own");
}

bool Loader::ready() const { return ::getpid() == owner_pid_ && run_ && run_->ready(); }

std::unique_ptr<Batch> Loader::next(std::chrono::nanoseconds timeout) {
  refuse_child();
  if (closed_) throw Error(ErrorKind::stopped, "the loader is closed");
  if (batches_per_epoch() == 0) throw Error(ErrorKind::usage, "an epoch has no batches");
  if (!run_) {
    if (!copy_plan_ && config_.peers && config_.places.count() > 0) plan_copies();
    run_ = std::make_unique<Run>(config_, batch_pool_, raw_pool_, speeds_, copies_,
                                 copy_plan_.get(), decoding_, position_);
  }
  std::unique_ptr<Batch> batch = run_->next(timeout);
  if (batch) {
    batch->memory = memory();
    position_ = {batch->position.epoch, batch->position.batch + 1};
    if (position_.batch == plan::batches_in(config_.job, position_.epoch)) {
      position_ = {position_.epoch + 1, 0};
    }
  }
  return batch;
}

void Loader::plan_copies() {
  const auto copied = [this](plan::SampleId sample) {
    const uint32_t owner = config_.peers->ownership().owner[sample];
    return config_.cache->tier_of(sample) == plan::kNoTier && owner != plan::kNoOwner &&
           owner != config_.peers->node_of_rank()[config_.rank];
  };
  const uint32_t first = config_.rank - config_.local_rank;
  copy_plan_ = std::make_unique<CopyPlan>([this, copied, first](uint32_t epoch) {
    return std::make_unique<plan::CopySchedule>(
        config_.job, first, std::min(config_.local_world, config_.job.world - first), config_.rank,
        epoch, config_.source->sizes(), config_.places, copied);
  });
}

void Loader::seek(Position position) {
  refuse_child();
  const uint64_t batches = plan::batches_in(config_.job, position.epoch);
  if (position.batch >= batches && position.batch != 0) {
    throw Error(ErrorKind::usage, "batch " + std::to_string(position.batch) +
                                      " is not in an epoch of " + std::to_string(batches) +
                                      " batches");
  }
  // What failed is tried anew: a file may have been repaired.
  if (position == position_ && !(run_ && run_->failed())) return;
  run_.reset();
  position_ = position;
}

Position Loader::position() const noexcept { return position_; }

void Loader::forget_sum(plan::SampleId sample) {
  if (run_) run_->forget(sample);
}

void Loader::close() {
  if (::getpid() != owner_pid_) return;
  run_.reset();
  copy_plan_.reset();  // asks the peers for owners
  config_.peers.reset();
  // What the node learned is kept with the index.
  if (config_.cache) config_.source->sums().learn(config_.cache->sums());
  config_.cache.reset();
  closed_ = true;
}

Memory Loader::memory() const {
  const auto& cache = config_.cache;
  return {cache ? cache->ram_bytes() : 0, cache ? cache->file_bytes() : 0, batch_pool_->bytes(),
          raw_pool_->bytes(), decoding_.most()};
}

uint64_t Loader::batches_per_epoch() const noexcept { return plan::batches_per_epoch(config_.job); }

const LoaderConfig& Loader::config() const noexcept { return config_; }

}  // namespace nostall::stage
