// stage/node_reader.h - samples in any order through the tiers of a node, for readers that have no plan.
//
// A sample that a tier of the node holds is taken from there. Any other is read from the source once,
// into its place in a tier if it has one. All processes of the node that name the same job, data set
// and tiers share what is kept, however many there are and whenever they come and go; it stays as long
// as one of them is there. Every sample is as likely as another: those with the lowest numbers have
// places where not all fit.
// Thread-safety: read() from any thread of the process that made the object, several at a time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "source/source.h"
#include "stage/origin.h"
#include "tier/node_cache.h"

namespace nostall::stage {

class NodeReader {
 public:
  // Throws what attach_node_cache throws, and what `waiting` throws (NodeSpec::waiting).
  NodeReader(std::shared_ptr<const source::Source> source, const std::string& job,
             std::vector<tier::TierSpec> tiers, std::function<void()> waiting = {});
  ~NodeReader();  // leaves; in a forked child it does nothing
  NodeReader(const NodeReader&) = delete;
  NodeReader& operator=(const NodeReader&) = delete;

  // Fills into[i], exactly as long as the sample, with the bytes of samples[i]; a number may come more
  // than once. Throws the Error of the first that cannot be used, Error(usage) in a forked child.
  void read(std::span<const uint64_t> samples, std::span<const std::span<std::byte>> into);

  const source::Source& source() const noexcept { return *source_; }
  // The tiers, for a loader of the samples `numbers` of the source, or of all of them without any; null
  // if there are none.
  std::shared_ptr<tier::NodeCache> share(std::vector<uint64_t> numbers) const;
  uint64_t taken(Origin origin) const noexcept;  // samples that this process took from there
  uint64_t ram_bytes() const noexcept;           // of the node, as NodeCache has them
  uint64_t file_bytes() const noexcept;

 private:
  struct Wanted;
  enum class Next : uint8_t { done, read, wait };
  void pass(std::vector<Wanted>& open, std::vector<Wanted>& to_read, bool patient);
  Next look(Wanted& wanted, bool patient);
  void read_source(std::span<Wanted> wanted);
  std::unique_ptr<source::Reader> take_reader();
  void count(Origin origin) noexcept { taken_[size_t(origin)].fetch_add(1); }

  const std::shared_ptr<const source::Source> source_;
  std::shared_ptr<tier::NodeCache> cache_;  // null: no tier has any capacity
  SampleSums& sums_;
  const int owner_pid_;
  std::array<std::atomic<uint64_t>, kOrigins> taken_{};
  std::atomic<bool> warned_{false};
  Mutex mutex_;
  std::vector<std::unique_ptr<source::Reader>> readers_
      NOSTALL_GUARDED_BY(mutex_);  // those not in use
};

}  // namespace nostall::stage
