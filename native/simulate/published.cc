// The simulation of [Böhringer 2020, sec. 4.1], event by event: each node has one reader for its
// staging buffer and one for each storage class that it fills, every reader has a clock, and the
// earliest one does its next read. Where the text leaves a choice, this is the reading that
// explains all rows of table 5.1 within 1 % (docs/reproduce/simulation.md):
//  - nodes are followed in the order of time; a read from the source takes s / min(b_fs, t(g) / g)
//    with g the nodes that are fetching from it at the read's first moment;
//  - the staging buffer is filled by one reader p_0 times as fast as a thread (eq. 3.3), each
//    other class by one reader as fast as one thread;
//  - a batch begins when all nodes have ended the one before; readers start anew there;
//  - a sample is read out of the staging buffer at r_0(p_0) / p_0 before it is consumed.
#include <algorithm>
#include <queue>
#include <utility>

#include "simulate/accesses.h"
#include "simulate/check.h"
#include "simulate/kept.h"
#include "simulate/simulate.h"

namespace nostall::simulate {
namespace {

class Published {
 public:
  Published(const Model& model, const plan::JobSpec& spec, std::span<const double> sizes,
            const Decision& decision)
      : model_(model),
        decision_(decision),
        sizes_(sizes),
        nodes_(model.nodes),
        classes_(model.classes.size()),
        accesses_(accesses_of(spec, decision)),
        kept_(decision, spec.samples, nodes_, classes_) {
    shares_.push_back(0);
    for (uint32_t g = 1; g <= nodes_; ++g) shares_.push_back(model.source_share(g));
    largest_share_ = *std::max_element(shares_.begin(), shares_.end());
    for (size_t j = 0; j < classes_; ++j) thread_read_.push_back(model.thread_read(j));
    begun_.assign(classes_, std::vector<double>(nodes_, -1.0));
    until_.assign(classes_, std::vector<double>(nodes_, -1.0));
    stage_.resize(nodes_);
    if (decision.cleanup) reads_left_ = reads_of(accesses_, sizes.size());
    fills_.assign(nodes_, std::vector<Fill>(classes_));
    result_.node_stall.assign(nodes_, 0);
    result_.staged.assign(classes_ + 1, 0);
    result_.epoch_source.assign(spec.epochs, 0);
  }

  Result run(uint32_t epochs) {
    double start = 0;
    if (decision_.filling == Filling::before) start = fill_before();
    result_.initial_seconds = start;
    result_.warm_seconds = start;
    result_.batch_seconds.reserve(accesses_.batches);
    for (uint64_t h = 0; h < accesses_.batches; ++h) {
      epoch_ = h / accesses_.batches_per_epoch;
      const double end = batch(h, start);
      result_.batch_seconds.push_back(end - start);
      start = end;
    }
    result_.seconds = start;
    for (uint32_t e = 0; e < epochs; ++e) {
      double sum = 0;
      for (uint64_t h = 0; h < accesses_.batches_per_epoch; ++h) {
        sum += result_.batch_seconds[e * accesses_.batches_per_epoch + h];
      }
      result_.epoch_seconds.push_back(sum);
    }
    return std::move(result_);
  }

 private:
  struct Stage {
    double clock = 0;        // when its reader is free
    uint64_t next = 0;       // the access that it reads next
    double held = 0;         // MB read and not consumed
    std::vector<double> at;  // of accesses of the current window: when they are there
    uint64_t first = 0;      // the access that at[0] is
  };
  struct Fill {
    double clock = 0;
    size_t next = 0;
    double held = 0;  // MB
  };
  struct Fetch {
    double seconds;
    size_t origin;  // index into Result::staged
  };

  // All nodes at once with t(N) / N each, or one after the other with t(1), p_0 threads each.
  double fill_before() {
    double slowest = 0, sum = 0;
    const double per_mb = 1 / model_.source_share(decision_.in_turn ? 1 : nodes_);
    for (uint32_t node = 0; node < nodes_ && !decision_.keep.empty(); ++node) {
      double mine = 0;
      for (const auto& list : decision_.keep[node]) {
        for (const uint32_t s : list) {
          mine += sizes_[s];
          kept_.fill(node, s, *kept_.own(node, s), 0);
        }
      }
      result_.kept_from_source += mine;
      const double seconds = mine * (per_mb + model_.stage_seconds()) / model_.classes[0].threads;
      slowest = std::max(slowest, seconds);
      sum += seconds;
    }
    return decision_.in_turn ? sum : slowest;
  }

  double batch(uint64_t h, double start) {
    for (uint32_t node = 0; node < nodes_; ++node) {
      stage_[node].clock = std::max(stage_[node].clock, start);
      for (Fill& fill : fills_[node]) fill.clock = std::max(fill.clock, start);
    }
    using Event = std::pair<double, uint32_t>;
    std::priority_queue<Event, std::vector<Event>, std::greater<>> now;
    double end = start, slowest = 0;
    for (uint32_t node = 0; node < nodes_; ++node) {
      const auto [first, last] = range(node, h);
      if (first < last) now.emplace(start, node);
      double mb = 0;
      for (uint64_t k = first; k < last; ++k) mb += sizes_[accesses_.samples[node][k]];
      slowest = std::max(slowest, mb / model_.compute);
    }
    position_.assign(nodes_, 0);
    while (!now.empty()) {
      const auto [time, node] = now.top();
      now.pop();
      const auto [first, last] = range(node, h);
      const uint64_t k = first + position_[node]++;
      const double size = sizes_[accesses_.samples[node][k]];
      const double there = request(node, k, time);
      result_.node_stall[node] += there - time;
      const double consumed = there + size / model_.compute;
      if (k + 1 < last) {
        now.emplace(consumed, node);
      } else {
        end = std::max(end, consumed);
      }
    }
    result_.compute_seconds.push_back(slowest + model_.step_seconds);
    return end + model_.step_seconds;
  }

  std::pair<uint64_t, uint64_t> range(uint32_t node, uint64_t h) const {
    return {h == 0 ? 0 : accesses_.ends[node][h - 1], accesses_.ends[node][h]};
  }

  // When access k of the node, wanted at `time`, is there.
  double request(uint32_t node, uint64_t k, double time) {
    const uint32_t sample = accesses_.samples[node][k];
    const double size = sizes_[sample];
    if (decision_.loading == Loading::perfect) return time;
    if (decision_.loading == Loading::on_demand) {
      advance(node, time, false);
      const Fetch fetch = fetch_for(node, sample, time);
      account(fetch, size);
      note_source(node, 0, fetch, time, 1);
      return time + fetch.seconds + size * model_.stage_seconds();
    }
    Stage& stage = stage_[node];
    advance(node, time, true);
    while (stage.next <= k) {
      // A wait for room ends at the latest when the sample that is wanted now is read.
      stage.clock = std::max(stage.clock, stage.held > 0 ? stage.clock : time);
      advance(node, stage.clock, true);
      if (stage.next <= k) read_ahead(node);
    }
    const double there = std::max(time, stage.at[k - stage.first]) + size / thread_read_[0];
    stage.held -= size;
    if (k - stage.first >= kWindow) {
      stage.at.erase(stage.at.begin(), stage.at.begin() + static_cast<ptrdiff_t>(kWindow));
      stage.first += kWindow;
    }
    if (decision_.cleanup) consume(node, sample, time);
    return there;
  }

  // Lets the node's readers do all that they begin until `time`, earliest first.
  void advance(uint32_t node, double time, bool staging) {
    Stage& stage = stage_[node];
    const auto& samples = accesses_.samples[node];
    while (true) {
      size_t reader = classes_;
      double earliest = time;
      if (staging && stage.next < samples.size() && stage.clock <= earliest &&
          stage.held + sizes_[samples[stage.next]] <= model_.classes[0].capacity) {
        reader = 0;
        earliest = stage.clock;
      }
      if (decision_.filling == Filling::prefetch) {
        for (size_t j = 1; j <= decision_.keep[node].size(); ++j) {
          Fill& fill = fills_[node][j];
          if (decision_.cleanup) skip_unwanted(node, j);
          if (fill.next < decision_.keep[node][j - 1].size() &&
              (fill.clock < earliest || (reader == classes_ && fill.clock <= earliest)) &&
              (!decision_.cleanup || fits(node, j))) {
            reader = j;
            earliest = fill.clock;
          }
        }
      }
      if (reader == classes_) return;
      if (reader == 0) {
        read_ahead(node);
      } else {
        keep_next(node, reader);
      }
    }
  }

  void read_ahead(uint32_t node) {
    Stage& stage = stage_[node];
    const uint32_t sample = accesses_.samples[node][stage.next];
    const double size = sizes_[sample], threads = model_.classes[0].threads;
    const Fetch fetch = fetch_for(node, sample, stage.clock);
    account(fetch, size);
    note_source(node, 0, fetch, stage.clock, threads);
    stage.clock += (fetch.seconds + size * model_.stage_seconds()) / threads;
    stage.at.push_back(stage.clock);
    stage.held += size;
    ++stage.next;
    if (decision_.filling == Filling::reading) {
      keep_read(node, node, sample, stage.clock);
      if (fetch.origin == classes_ && !decision_.owner.empty() &&
          decision_.owner[sample] != plan::kNoOwner) {
        keep_read(decision_.owner[sample], node, sample, stage.clock);
      }
    }
  }

  // `by` has read the sample, and hands it to `node` if that is to keep it.
  void keep_read(uint32_t node, uint32_t by, uint32_t sample, double time) {
    const auto copy = kept_.own(node, sample);
    if (!copy || copy->since != kNotYet) return;
    const double there = node == by ? time : time + sizes_[sample] / model_.network;
    kept_.fill(node, sample, *copy, there);
    result_.warm_seconds = std::max(result_.warm_seconds, there);
  }

  void keep_next(uint32_t node, size_t j) {
    Fill& fill = fills_[node][j];
    const uint32_t sample = decision_.keep[node][j - 1][fill.next++];
    const double size = sizes_[sample];
    const Fetch fetch = fetch_for(node, sample, fill.clock);
    note_source(node, j, fetch, fill.clock, 1);
    (fetch.origin == classes_ ? result_.kept_from_source : result_.kept_from_nodes) += size;
    const double write = model_.thread_write(j);
    fill.clock += fetch.seconds + (write > 0 ? size / write : 0);
    fill.held += size;
    kept_.fill(node, sample, *kept_.own(node, sample), fill.clock);
    result_.warm_seconds = std::max(result_.warm_seconds, fill.clock);
  }

  // What the node will not read again is not fetched any more.
  void skip_unwanted(uint32_t node, size_t j) {
    Fill& fill = fills_[node][j];
    const auto& list = decision_.keep[node][j - 1];
    while (fill.next < list.size() && reads_left_[node][list[fill.next]] == 0) ++fill.next;
  }

  bool fits(uint32_t node, size_t j) const {
    const Fill& fill = fills_[node][j];
    return fill.held + sizes_[decision_.keep[node][j - 1][fill.next]] <= model_.classes[j].capacity;
  }

  // cleanup_read: what the node will not read again makes room.
  void consume(uint32_t node, uint32_t sample, double time) {
    if (--reads_left_[node][sample] > 0) return;
    const auto copy = kept_.own(node, sample);
    if (!copy || copy->since > time) return;
    kept_.drop(node, sample, *copy);
    Fill& fill = fills_[node][copy->storage_class];
    fill.held -= sizes_[sample];
    fill.clock = std::max(fill.clock, time);
  }

  // The fastest origin at `time` [Böhringer 2020, eq. 3.5 to 3.7].
  Fetch fetch_for(uint32_t node, uint32_t sample, double time) const {
    double speed = 0;
    size_t origin = classes_;
    const auto own = kept_.own(node, sample);
    if (own && own->since <= time) {
      speed = thread_read_[own->storage_class];
      origin = own->storage_class - 1;
    }
    if (const auto remote = kept_.remote(sample, time)) {
      const double there = std::min(model_.network, thread_read_[remote->storage_class]);
      if (there > speed) {
        speed = there;
        origin = classes_ - 1;
      }
    }
    // Even one reader alone gets no more than the largest share.
    const double source = speed > largest_share_ ? 0 : shares_[readers(node, time)];
    if (source > speed) {
      speed = source;
      origin = classes_;
    }
    return {sizes_[sample] / speed, origin};
  }

  void note_source(uint32_t node, size_t j, const Fetch& fetch, double time, double threads) {
    if (fetch.origin != classes_) return;
    begun_[j][node] = time;
    until_[j][node] = time + fetch.seconds / threads;
  }

  // gamma: nodes that fetch from the source at `time`, this one included.
  uint32_t readers(uint32_t node, double time) const {
    uint32_t count = 0;
    for (uint32_t n = 0; n < nodes_; ++n) {
      // Without branches: with many nodes this is where the time goes.
      unsigned reads = 0;
      for (size_t j = 0; j < classes_; ++j) {
        reads |= unsigned{begun_[j][n] <= time} & unsigned{time < until_[j][n]};
      }
      count += n == node ? 0 : reads;
    }
    return count + 1;
  }

  void account(const Fetch& fetch, double size) {
    result_.staged[fetch.origin] += size;
    if (fetch.origin == classes_) result_.epoch_source[epoch_] += size;
  }

  static constexpr uint64_t kWindow = 4096;

  const Model& model_;
  const Decision& decision_;
  const std::span<const double> sizes_;
  const uint32_t nodes_;
  const size_t classes_;  // class 0 included; also the index of the source in Result::staged
  const Accesses accesses_;
  Kept kept_;
  std::vector<double> shares_;  // [gamma]
  double largest_share_ = 0;
  std::vector<double> thread_read_;                 // [class]
  std::vector<std::vector<double>> begun_, until_;  // [class][node]: the last fetch from the source
  std::vector<Stage> stage_;
  std::vector<std::vector<Fill>> fills_;  // [node][class]
  std::vector<std::vector<uint32_t>> reads_left_;
  std::vector<uint64_t> position_;
  uint64_t epoch_ = 0;
  Result result_;
};

}  // namespace

Result published(const Model& model, const plan::JobSpec& spec, std::span<const double> sizes,
                 const Decision& decision) {
  check(model, spec, sizes, decision);
  return Published(model, spec, sizes, decision).run(spec.epochs);
}

}  // namespace nostall::simulate
