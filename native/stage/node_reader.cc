// Reads samples through the node's tiers: a pass takes what is there, reads from the source what this
// process claimed or no tier keeps, and waits for what other processes are reading. Claims end before
// it waits, so that two processes never wait for each other.
#include "stage/node_reader.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>

#include "base/activity.h"
#include "base/log.h"
#include "stage/content.h"
#include "stage/node.h"
#include "tier/cache_view.h"

namespace nostall::stage {
namespace {

constexpr unsigned kDepth = 16;  // reads in flight
// The longest wait for another process that is reading a sample, and one wait of it.
constexpr std::chrono::seconds kPatience{10};
constexpr std::chrono::milliseconds kSlice{20};

std::shared_ptr<tier::NodeCache> attach(const source::Source& source, const std::string& job,
                                        std::vector<tier::TierSpec> tiers,
                                        std::function<void()> waiting) {
  plan::JobSpec each;  // every sample once, in the order of the source
  each.samples = source.size();
  each.order = plan::OrderKind::sequential;
  each.global_batch = each.order_world = each.world = each.epochs = 1;
  NodeSpec node;
  node.job = job;
  node.local_world = tier::kAnyMembers;
  node.any_member = true;
  node.tiers = std::move(tiers);
  node.waiting = std::move(waiting);
  return attach_node_cache(each, 0, source, node, Sharing::push).cache;
}

}  // namespace

struct NodeReader::Wanted {
  uint64_t sample = 0;
  std::span<std::byte> into;
  std::span<std::byte> slot{};  // of the RAM tier, if this process fills it
  bool claimed = false;
};

NodeReader::NodeReader(std::shared_ptr<const source::Source> source, const std::string& job,
                       std::vector<tier::TierSpec> tiers, std::function<void()> waiting)
    : source_(std::move(source)),
      cache_(attach(*source_, job, std::move(tiers), std::move(waiting))),
      sums_(cache_ ? cache_->sums() : source_->sums()),
      owner_pid_(::getpid()) {}

NodeReader::~NodeReader() {
  if (::getpid() == owner_pid_) {
    if (cache_) source_->sums().learn(cache_->sums());
    return;
  }
  // What a reader has begun belongs to the parent; so may the lock.
  for (auto& reader : readers_) [[maybe_unused]] source::Reader* lost = reader.release();
}

std::shared_ptr<tier::NodeCache> NodeReader::share(std::vector<uint64_t> numbers) const {
  return cache_ ? tier::view_of(cache_, std::move(numbers)) : nullptr;
}

uint64_t NodeReader::taken(Origin origin) const noexcept { return taken_[size_t(origin)].load(); }
uint64_t NodeReader::ram_bytes() const noexcept { return cache_ ? cache_->ram_bytes() : 0; }
uint64_t NodeReader::file_bytes() const noexcept { return cache_ ? cache_->file_bytes() : 0; }

std::unique_ptr<source::Reader> NodeReader::take_reader() {
  {
    const MutexLock lock(mutex_);
    if (!readers_.empty()) {
      std::unique_ptr<source::Reader> reader = std::move(readers_.back());
      readers_.pop_back();
      return reader;
    }
  }
  return source_->make_reader(source::ReaderKind::automatic, kDepth);
}

void NodeReader::read(std::span<const uint64_t> samples,
                      std::span<const std::span<std::byte>> into) {
  if (::getpid() != owner_pid_) {
    throw Error(ErrorKind::usage, "this reader belongs to process " + std::to_string(owner_pid_) +
                                      "; a forked child must make its own");
  }
  std::vector<Wanted> open, to_read;
  for (size_t i = 0; i < samples.size(); ++i) open.push_back({samples[i], into[i]});
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!open.empty()) {
    const bool patient = std::chrono::steady_clock::now() < deadline;
    try {
      pass(open, to_read, patient);
      if (!to_read.empty()) read_source(to_read);
    } catch (...) {
      for (const std::vector<Wanted>* some : {&open, &to_read}) {
        for (const Wanted& w : *some) {
          if (w.claimed) cache_->abandon(w.sample);
        }
      }
      throw;
    }
    if (to_read.empty() && !open.empty()) cache_->wait(open.front().sample, kSlice, {});
  }
}

// Moves what is to be read out of `open`, and takes away what a tier has.
void NodeReader::pass(std::vector<Wanted>& open, std::vector<Wanted>& to_read, bool patient) {
  to_read.clear();
  to_read.reserve(open.size());  // before anything is claimed
  size_t left = 0;
  for (Wanted& wanted : open) {
    const Next next = look(wanted, patient);
    if (next == Next::read) to_read.push_back(std::exchange(wanted, {}));
    if (next == Next::wait) open[left++] = wanted;
  }
  open.resize(left);
}

// Takes the sample if a tier has it; else claims its place, if that is free.
NodeReader::Next NodeReader::look(Wanted& wanted, bool patient) {
  const uint64_t sample = wanted.sample;
  while (cache_ && cache_->placed(sample)) {
    switch (cache_->state(sample)) {
      case tier::State::ready:
        if (cache_->kind(sample) == tier::TierKind::file) {
          const Activity reading;
          if (!cache_->file_read(sample, wanted.into)) return Next::read;
          count(Origin::file);
          return Next::done;
        }
        if (const tier::RamView view = cache_->ram_view(sample)) {
          std::memcpy(wanted.into.data(), view.bytes().data(), wanted.into.size());
        } else {
          continue;  // its memory was given back
        }
        if (!sums_.agrees(sample, wanted.into)) {
          cache_->reject(sample);
          return Next::read;
        }
        count(Origin::ram);
        return Next::done;
      case tier::State::failed:
        return Next::read;
      case tier::State::filling:
        return patient ? Next::wait : Next::read;
      case tier::State::empty:
        break;
    }
    if (!cache_->claim(sample)) continue;  // another was first, or the tier has failed since
    wanted.claimed = true;
    if (cache_->kind(sample) == tier::TierKind::ram) {
      wanted.slot = cache_->ram_slot(sample);
      wanted.claimed = wanted.slot.size() == wanted.into.size();  // else no memory, as it has said
    }
    return Next::read;
  }
  return Next::read;
}

void NodeReader::read_source(std::span<Wanted> wanted) {
  std::vector<source::ReadRequest> requests;
  const auto in_ram = [&](const Wanted& w) {
    return w.claimed && cache_->kind(w.sample) == tier::TierKind::ram;
  };
  std::unique_ptr<source::Reader> reader = take_reader();
  for (const Wanted& w : wanted) {
    requests.push_back({w.sample, in_ram(w) ? w.slot : w.into, 0, w.claimed});
  }
  {
    const Activity reading;
    reader->read(requests);
    compare(*source_, sums_, requests, *reader, warned_);
  }
  {
    const MutexLock lock(mutex_);
    readers_.push_back(std::move(reader));
  }
  std::optional<Error> failed;
  for (size_t i = 0; i < wanted.size(); ++i) {
    Wanted& w = wanted[i];
    const source::ReadRequest& request = requests[i];
    if (request.error != 0) {
      if (std::exchange(w.claimed, false)) cache_->abandon(w.sample);
      if (failed) continue;
      const bool wrong = request.error == source::kWrongBytes;
      failed.emplace(wrong ? ErrorKind::corruption : ErrorKind::io,
                     (wrong ? "" : "cannot read ") + source_->describe(w.sample) + ": " +
                         source::read_error_text(request));
      continue;
    }
    count(Origin::source);
    if (in_ram(w)) {
      std::memcpy(w.into.data(), w.slot.data(), w.into.size());
      cache_->publish(w.sample);
    } else if (w.claimed) {
      cache_->file_write(w.sample, w.into);
    }
    w.claimed = false;
  }
  if (failed) throw Error(*failed);
}

}  // namespace nostall::stage
