// A fluid model of the same machine that never gives more than there is. A node stages one local
// batch at a time and each of its storage classes fetches one chunk at a time; a transfer draws on
// the source, links and devices in the proportion of its samples' origins, and all transfers share
// them max-min fair (share.h). Rates change when a transfer ends or begins, nowhere else.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "plan/copies_by_use.h"
#include "simulate/accesses.h"
#include "simulate/check.h"
#include "simulate/held.h"
#include "simulate/kept.h"
#include "simulate/share.h"
#include "simulate/simulate.h"

namespace nostall::simulate {
namespace {

// With more nodes than this, devices of one class and outgoing links are one pool each: remote
// reads are spread over so many that single ones do not stand out.
constexpr uint32_t kSingleDevices = 64;
// With pooled devices, events within 1/64 of a batch are handled together. What a transfer moved
// beyond its end is credited to the next transfer of its kind.
constexpr double kMomentsABatch = 64;

class Consistent {
 public:
  Consistent(const Model& model, const plan::JobSpec& spec, std::span<const double> sizes,
             const Decision& decision)
      : model_(model),
        decision_(decision),
        sizes_(sizes),
        nodes_(model.nodes),
        classes_(model.classes.size()),
        pooled_(nodes_ > kSingleDevices),
        accesses_(accesses_of(spec, decision)),
        kept_(decision, spec.samples, nodes_, classes_) {
    // Resources: the source, then by node its link to the source, in, out, and its devices.
    device_base_ = 1 + 3 * nodes_;
    const uint32_t places = pooled_ ? 1 : nodes_;
    capacity_.assign(device_base_ + places * (classes_ - 1), 0);
    for (uint32_t n = 0; n < nodes_; ++n) {
      capacity_[link(n)] = model.source_link;
      capacity_[in(n)] = model.network;
      capacity_[out(n)] = model.network * (pooled_ ? nodes_ : 1);
    }
    for (size_t j = 1; j < classes_; ++j) {
      const StorageClass& c = model.classes[j];
      const double read = interpolate(c.read, c.threads);
      const double write = c.write.empty() ? read : interpolate(c.write, c.threads);
      write_weight_.push_back(read / write);
      for (uint32_t n = 0; n < places; ++n) {
        capacity_[device(n, j)] = read * (pooled_ ? nodes_ : 1);
      }
    }
    scratch_.assign(capacity_.size(), 0);
    flows_.resize(nodes_ * classes_);
    transfers_.resize(flows_.size());
    surplus_.assign(flows_.size(), 0);
    next_batch_.assign(nodes_, 0);
    staged_to_.assign(nodes_, 0);
    held_.assign(nodes_, 0);
    fill_next_.assign(flows_.size(), 0);
    if (decision.cleanup) {
      reads_left_ = reads_of(accesses_, sizes.size());
      kept_mb_.assign(flows_.size(), 0);
    }
    if (decision.filling == Filling::evicting) {
      held_copies_.emplace(accesses_, sizes, model);
    }
    if (!decision.copies.empty()) follow_next_uses();
    claimed_.assign(decision.filling == Filling::reading ? sizes.size() : 0, plan::kNoOwner);
    result_.node_stall.assign(nodes_, 0);
    result_.staged.assign(classes_ + 1, 0);
    result_.epoch_source.assign(spec.epochs, 0);
    result_.epoch_seconds.assign(spec.epochs, 0);
    double total = 0;
    for (const double s : sizes) total += s;
    chunk_ = std::max(1e-9, total / static_cast<double>(nodes_) /
                                static_cast<double>(accesses_.batches_per_epoch));
    const StorageClass& stage = model.classes[0];
    const double threads = decision.loading == Loading::on_demand ? 1 : stage.threads;
    stage_cap_ = threads / model.stage_seconds();
  }

  Result run() {
    training_ = decision_.filling != Filling::before;
    while (batch_ < accesses_.batches) {
      begin_transfers();
      if (!training_ && transfers_under_way_ == 0) {
        training_ = true;
        result_.initial_seconds = batch_end_ = now_;
        continue;
      }
      if (training_ && !computing_ && staged_everywhere()) {
        begin_compute();
        continue;  // its room in the staging buffers may let transfers begin
      }
      step();
    }
    result_.seconds = now_;
    return std::move(result_);
  }

 private:
  struct Transfer {
    bool active = false;
    double left = 0;                    // MB
    bool source = false;                // draws on the source
    uint64_t first = 0;                 // of a batch: the node's access that is its first sample
    std::vector<uint32_t> samples;      // that it brings
    std::vector<uint32_t> from_source;  // of these
  };

  uint32_t link(uint32_t n) const { return 1 + n; }
  uint32_t in(uint32_t n) const { return 1 + nodes_ + n; }
  uint32_t out(uint32_t n) const { return 1 + 2 * nodes_ + (pooled_ ? 0 : n); }
  uint32_t device(uint32_t n, size_t j) const {
    const auto place = static_cast<uint32_t>((pooled_ ? 0 : n) * (classes_ - 1) + j - 1);
    return device_base_ + place;
  }

  void begin_transfers() {
    for (uint32_t node = 0; node < nodes_; ++node) {
      if (training_) begin_staging(node);
      if (decision_.filling != Filling::prefetch && decision_.filling != Filling::before) continue;
      for (size_t j = 1; j <= decision_.keep[node].size(); ++j) begin_fill(node, j);
    }
    std::fill(surplus_.begin(), surplus_.end(), 0);
  }

  void begin_staging(uint32_t node) {
    Transfer& transfer = transfers_[node * classes_];
    while (!transfer.active && next_batch_[node] < accesses_.batches) {
      const uint64_t h = next_batch_[node];
      const bool ahead = h > batch_ || (h == batch_ && computing_);
      if (ahead && decision_.loading != Loading::staged) return;
      const auto [first, last] = range(node, h);
      double mb = 0;
      for (uint64_t k = first; k < last; ++k) mb += sizes_[accesses_.samples[node][k]];
      if (held_[node] > 0 && held_[node] + mb > model_.classes[0].capacity) return;
      held_[node] += mb;
      ++next_batch_[node];
      const auto* samples = accesses_.samples[node].data();
      transfer.samples.assign(samples + first, samples + last);
      transfer.first = first;
      if (mb > 0 && decision_.loading != Loading::perfect) {
        begin(node, 0, mb, h / accesses_.batches_per_epoch);
      } else {
        end_staging(node);
      }
    }
  }

  void begin_fill(uint32_t node, size_t j) {
    const size_t index = node * classes_ + j;
    Transfer& transfer = transfers_[index];
    const auto& list = decision_.keep[node][j - 1];
    while (!transfer.active && fill_next_[index] < list.size()) {
      double mb = 0;
      transfer.samples.clear();
      while (fill_next_[index] < list.size() && mb < chunk_) {
        const uint32_t sample = list[fill_next_[index]];
        if (decision_.cleanup) {
          if (reads_left_[node][sample] == 0) {
            ++fill_next_[index];  // this node will not read it again
            continue;
          }
          if (kept_mb_[index] + sizes_[sample] > model_.classes[j].capacity) break;
          kept_mb_[index] += sizes_[sample];
        }
        ++fill_next_[index];
        mb += sizes_[sample];
        transfer.samples.push_back(sample);
      }
      if (mb > 0) {
        begin(node, j, mb, 0);
      } else if (transfer.samples.empty()) {
        return;  // waits for room, or is through
      } else {
        end_fill(node, j);
      }
    }
  }

  void take(uint32_t resource, double mb) {
    if (scratch_[resource] == 0) touched_.push_back(resource);
    scratch_[resource] += mb;
  }
  void take_write(uint32_t node, size_t j, double mb) {
    take(device(node, j), mb * write_weight_[j - 1]);
  }

  // What the transfer's samples take of which resource, as things are now.
  void begin(uint32_t node, size_t j, double mb, uint64_t epoch) {
    Transfer& transfer = transfers_[node * classes_ + j];
    transfer.from_source.clear();
    touched_.clear();
    for (size_t i = 0; i < transfer.samples.size(); ++i) {
      const uint32_t sample = transfer.samples[i];
      const double size = sizes_[sample];
      if (size == 0) continue;
      const size_t origin = held_copies_ ? take_evicting(node, sample, size, transfer.first + i)
                                         : take_sample(node, j, sample, size);
      if (origin == classes_) transfer.from_source.push_back(sample);
      if (j == 0) {
        result_.staged[origin] += size;
        if (origin == classes_) result_.epoch_source[epoch] += size;
      } else {
        (origin == classes_ ? result_.kept_from_source : result_.kept_from_nodes) += size;
        take_write(node, j, size);
      }
    }
    Flow& flow = flows_[node * classes_ + j];
    flow.demand.clear();
    for (const uint32_t resource : touched_) {
      flow.demand.emplace_back(resource, scratch_[resource] / mb);
      scratch_[resource] = 0;
    }
    // Its device is a resource of its own: beyond that a fill has no limit.
    flow.cap = j == 0 ? stage_cap_ : std::numeric_limits<double>::max();
    transfer.active = true;
    transfer.left = std::max(0.0, mb - surplus_[node * classes_ + j]);
    transfer.source = !transfer.from_source.empty();
    ++transfers_under_way_;
    shared_ = false;
  }

  // Whether the node may hold a copy of the sample for a while.
  bool is_copied(uint32_t node, uint64_t sample) const {
    const uint32_t owner = decision_.owner[sample];
    return sizes_[sample] > 0 && owner != node && owner != plan::kNoOwner &&
           !kept_.own(node, static_cast<uint32_t>(sample));
  }

  void follow_next_uses() {
    for (const double mb : sizes_) bytes_.push_back(static_cast<uint64_t>(std::llround(mb * 1e6)));
    for (uint32_t node = 0; node < nodes_; ++node) {
      const auto copied = [&](uint64_t sample) { return is_copied(node, sample); };
      copies_.emplace_back(bytes_, decision_.copies[node]);
      std::vector<uint32_t> accesses;
      std::ranges::copy_if(accesses_.samples[node], std::back_inserter(accesses), copied);
      copies_[node].know(accesses, true);
    }
  }

  // The origin as in Result::staged: class - 1, then other nodes, then the source.
  size_t take_sample(uint32_t node, size_t j, uint32_t sample, double size) {
    const bool filling = decision_.filling == Filling::reading && j == 0;
    const auto own = kept_.own(node, sample);
    if (own && own->since <= now_) {
      take(device(node, own->storage_class), size);
      return own->storage_class - 1;
    }
    if (filling && own) take_write(node, own->storage_class, size);
    if (!copies_.empty() && is_copied(node, sample)) {
      const plan::CopyUse use = copies_[node].next();
      if (use.held) {
        take(device(node, 1), size);
        return 0;
      }
      if (use.keep) take_write(node, 1, size);
    }
    if (const auto remote = kept_.remote(sample, now_)) {
      take(device(remote->node, remote->storage_class), size);
      take(out(remote->node), size);
      take(in(node), size);
      return classes_ - 1;
    }
    if (filling && claimed_[sample] != plan::kNoOwner && claimed_[sample] != node) {
      // Another node is reading it now, and passes it on.
      take(out(claimed_[sample]), size);
      take(in(node), size);
      return classes_ - 1;
    }
    take(0, size);
    take(link(node), size);
    if (filling && !decision_.owner.empty() && decision_.owner[sample] != plan::kNoOwner) {
      claimed_[sample] = node;
      const uint32_t owner = decision_.owner[sample];
      const auto copy = kept_.own(owner, sample);
      if (owner != node && copy) {
        take(out(node), size);
        take(in(owner), size);
        take_write(owner, copy->storage_class, size);
      }
    }
    return classes_;
  }

  // The same where nodes keep what they read and drop what they need last.
  size_t take_evicting(uint32_t node, uint32_t sample, double size, uint64_t access) {
    size_t origin = classes_;
    if (const auto copy = held_copies_->copy_for(node, sample)) {
      take(device(copy->node, copy->storage_class), size);
      origin = copy->storage_class - 1;
      if (copy->node != node) {
        take(out(copy->node), size);
        take(in(node), size);
        origin = classes_ - 1;
      }
    } else {
      take(0, size);
      take(link(node), size);
    }
    if (const auto kept = held_copies_->read(node, access)) {
      if (kept->node != node) {
        take(out(node), size);
        take(in(kept->node), size);
      }
      take_write(kept->node, kept->storage_class, size);
      result_.warm_seconds = now_;
    }
    return origin;
  }

  void end_staging(uint32_t node) {
    Transfer& transfer = transfers_[node * classes_];
    if (decision_.filling == Filling::reading) {
      for (const uint32_t sample : transfer.samples) keep(node, sample);
      for (const uint32_t sample : transfer.from_source) {
        claimed_[sample] = plan::kNoOwner;
        if (!decision_.owner.empty() && decision_.owner[sample] != plan::kNoOwner) {
          keep(decision_.owner[sample], sample);
        }
      }
    }
    if (decision_.cleanup) {
      for (const uint32_t sample : transfer.samples) drop_after_last_read(node, sample);
    }
    if (staged_to_[node]++ == batch_ && !computing_) {
      result_.node_stall[node] += now_ - batch_end_;
    }
  }

  void keep(uint32_t node, uint32_t sample) {
    const auto copy = kept_.own(node, sample);
    if (!copy || copy->since <= now_) return;
    kept_.fill(node, sample, *copy, now_);
    result_.warm_seconds = now_;
  }

  void drop_after_last_read(uint32_t node, uint32_t sample) {
    if (--reads_left_[node][sample] > 0) return;
    const auto copy = kept_.own(node, sample);
    if (!copy || copy->since > now_) return;
    kept_.drop(node, sample, *copy);
    kept_mb_[node * classes_ + copy->storage_class] -= sizes_[sample];
  }

  void end_fill(uint32_t node, size_t j) {
    for (const uint32_t sample : transfers_[node * classes_ + j].samples) keep(node, sample);
  }

  bool staged_everywhere() const {
    return std::all_of(staged_to_.begin(), staged_to_.end(),
                       [&](uint64_t staged) { return staged > batch_; });
  }

  void begin_compute() {
    double slowest = 0;
    for (uint32_t node = 0; node < nodes_; ++node) {
      const auto [first, last] = range(node, batch_);
      double mb = 0;
      for (uint64_t k = first; k < last; ++k) mb += sizes_[accesses_.samples[node][k]];
      // Nothing, where nothing is staged behind: the rest of rounded sums would keep out a large batch.
      held_[node] = next_batch_[node] == batch_ + 1 ? 0 : std::max(0.0, held_[node] - mb);
      slowest = std::max(slowest, mb);
    }
    const double seconds = slowest / model_.compute + model_.step_seconds;
    result_.compute_seconds.push_back(seconds);
    compute_end_ = now_ + seconds;
    computing_ = true;
  }

  std::pair<uint64_t, uint64_t> range(uint32_t node, uint64_t h) const {
    return {h == 0 ? 0 : accesses_.ends[node][h - 1], accesses_.ends[node][h]};
  }

  // To the next moment at which something ends.
  void step() {
    if (!shared_) {
      uint32_t readers = 0;
      for (uint32_t node = 0; node < nodes_; ++node) {
        bool reads = false;
        for (size_t j = 0; j < classes_; ++j) reads |= transfers_[node * classes_ + j].source;
        readers += reads;
      }
      capacity_[0] = interpolate(model_.source, std::max(1u, readers));
      sharing_.share(flows_, capacity_);
      shared_ = true;
    }
    constexpr double kNever = std::numeric_limits<double>::infinity();
    double seconds = kNever;
    for (size_t f = 0; f < flows_.size(); ++f) {
      if (transfers_[f].active) seconds = std::min(seconds, transfers_[f].left / flows_[f].rate);
    }
    if (pooled_ && seconds < moment_) seconds = moment_;
    if (computing_) seconds = std::min(seconds, compute_end_ - now_);
    if (seconds == kNever) {
      throw Error(ErrorKind::bug, "the simulation stands still in batch " + std::to_string(batch_));
    }
    now_ += seconds;
    const bool ends_compute = computing_ && now_ >= compute_end_;
    if (ends_compute) now_ = compute_end_;
    for (size_t f = 0; f < flows_.size(); ++f) {
      Transfer& transfer = transfers_[f];
      if (!transfer.active) continue;
      const double moved = flows_[f].rate * seconds;
      transfer.left -= moved;
      // A trillionth of what moved is rounding.
      if (transfer.left > moved * 1e-12) continue;
      surplus_[f] = std::max(0.0, -transfer.left);
      transfer.active = false;
      transfer.source = false;
      flows_[f].cap = 0;
      shared_ = false;
      --transfers_under_way_;
      const auto node = static_cast<uint32_t>(f / classes_);
      if (f % classes_ == 0) {
        end_staging(node);
      } else {
        end_fill(node, f % classes_);
      }
    }
    if (ends_compute) {
      computing_ = false;
      result_.batch_seconds.push_back(now_ - batch_end_);
      result_.epoch_seconds[batch_ / accesses_.batches_per_epoch] += now_ - batch_end_;
      moment_ = (now_ - batch_end_) / kMomentsABatch;
      batch_end_ = now_;
      ++batch_;
    }
  }

  const Model& model_;
  const Decision& decision_;
  const std::span<const double> sizes_;
  const uint32_t nodes_;
  const size_t classes_;  // class 0 included; also the index of the source in Result::staged
  const bool pooled_;
  const Accesses accesses_;
  Kept kept_;
  std::optional<Held> held_copies_;        // with Filling::evicting
  std::vector<uint64_t> bytes_;            // [sample], with copies by next use
  std::vector<plan::CopiesByUse> copies_;  // [node], the same
  uint32_t device_base_ = 0;
  std::vector<double> capacity_;      // [resource], MB/s
  std::vector<double> write_weight_;  // [class - 1]: MB of reading that a written MB costs
  std::vector<double> scratch_;
  std::vector<uint32_t> touched_;
  std::vector<Flow> flows_;          // [node * classes + class]; class 0 stages
  std::vector<Transfer> transfers_;  // the same
  std::vector<double> surplus_;      // the same: MB that the last transfer moved beyond its end
  double moment_ = 0;                // seconds; used where devices are pooled
  Sharing sharing_;
  bool shared_ = false;  // the rates are those of the flows under way
  size_t transfers_under_way_ = 0;
  std::vector<uint64_t> next_batch_, staged_to_;   // [node]: batches begun, batches there
  std::vector<double> held_;                       // [node]: MB of the staging buffer
  std::vector<size_t> fill_next_;                  // as flows
  std::vector<std::vector<uint32_t>> reads_left_;  // [node][sample], with cleanup
  std::vector<double> kept_mb_;                    // as flows, with cleanup
  std::vector<uint32_t> claimed_;  // [sample]: the node that is reading it for its owner
  double chunk_ = 0, stage_cap_ = 0;
  bool training_ = false, computing_ = false;
  double now_ = 0, compute_end_ = 0, batch_end_ = 0;
  uint64_t batch_ = 0;
  Result result_;
};

}  // namespace

Result consistent(const Model& model, const plan::JobSpec& spec, std::span<const double> sizes,
                  const Decision& decision) {
  check(model, spec, sizes, decision);
  return Consistent(model, spec, sizes, decision).run();
}

}  // namespace nostall::simulate
