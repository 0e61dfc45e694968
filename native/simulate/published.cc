// The simulation of [Böhringer 2020, sec. 4.1], read by read. The text leaves much open; this is the
// reading that gives tables 5.1 to 5.4 (docs/reproduce/simulation.md):
//  - Inside a batch the nodes are followed one after the other, each from the moment when all have
//    ended the batch before.
//  - Each node logs when its reads from the source begin. A read at time t on one node counts as
//    clients those nodes whose log has an entry at or after t: what the nodes before it have read,
//    and nothing of those after it. So the first node reads alone, the last one beside all others.
//  - Each of p threads reads at t(g) / g; p threads so draw p times a client's share. The p_0
//    threads of the staging buffers take turns, on all nodes one turn.
//  - Reads from a class of the node or of another one go at r_j(p_j), not divided by p_j.
//  - The staging buffer is filled as soon as it has room, with clocks that run ahead of the
//    training. A batch makes room when the first sample of the next one is handed out.
//  - A sample that the staging buffer will have later than a read at once would is read at once.
//  - What is filled before or beside the training (classes of HDMLP) goes at t(N) / N a thread,
//    whatever else is read, and enters no log. The training begins when the last node is filled.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "simulate/accesses.h"
#include "simulate/check.h"
#include "simulate/kept.h"
#include "simulate/simulate.h"

namespace nostall::simulate {
namespace {

// The starts of a node's reads, in the order in which they were made. Threads that take turns make
// that not quite the order of time; the search goes on as if it were.
class Log {
 public:
  void add(double time) { times_.push_back(time); }
  bool has_since(double time) const {
    return std::lower_bound(times_.begin(), times_.end(), time) != times_.end();
  }

 private:
  std::vector<double> times_;
};

class Published {
 public:
  Published(const Model& model, const plan::JobSpec& spec, std::span<const double> sizes,
            const Decision& decision)
      : model_(model),
        decision_(decision),
        sizes_(sizes),
        epochs_(spec.epochs),
        classes_(model.classes.size()),
        accesses_(accesses_of(spec, decision)),
        kept_(decision, spec.samples, model.nodes, classes_),
        nodes_(model.nodes) {
    for (uint32_t g = 1; g <= model.nodes; ++g) shares_.push_back(model.source_share(g));
    largest_share_ = *std::max_element(shares_.begin(), shares_.end());
    for (size_t j = 0; j < classes_; ++j) {
      class_read_.push_back(model.thread_read(j) * model.classes[j].threads);
    }
    for (Node& node : nodes_) {
      node.threads.assign(model.classes[0].threads, 0.0);
      for (size_t j = 1; j < classes_; ++j) {
        node.fills.emplace_back().threads.assign(model.classes[j].threads, 0.0);
      }
    }
    if (decision.cleanup) reads_left_ = reads_of(accesses_, sizes.size());
    result_.node_stall.assign(model.nodes, 0);
    result_.staged.assign(classes_ + 1, 0);
    result_.epoch_source.assign(epochs_, 0);
  }

  Result run() {
    double start = 0;
    if (decision_.filling == Filling::before) start = fill_before();
    for (uint32_t n = 0; n < nodes_.size() && decision_.filling == Filling::prefetch; ++n) {
      fill_beside(n, 0);
    }
    for (uint32_t n = 0; n < nodes_.size() && decision_.loading == Loading::staged; ++n) {
      read_ahead(n, 0);
    }
    result_.initial_seconds = start;
    result_.warm_seconds = std::max(result_.warm_seconds, start);
    for (uint64_t h = 0; h < accesses_.batches; ++h) {
      const double end = batch(h, start);
      result_.batch_seconds.push_back(end - start);
      start = end;
    }
    result_.seconds = start;
    for (uint32_t e = 0; e < epochs_; ++e) {
      double sum = 0;
      for (uint64_t h = 0; h < accesses_.batches_per_epoch; ++h) {
        sum += result_.batch_seconds[e * accesses_.batches_per_epoch + h];
      }
      result_.epoch_seconds.push_back(sum);
    }
    return std::move(result_);
  }

 private:
  // Threads that fill one storage class of a node.
  struct Fill {
    std::vector<double> threads;  // when each is free
    size_t turn = 0;
    size_t next = 0;  // of the decision's list
    double held = 0;  // MB
  };
  struct Node {
    std::vector<double> threads;  // of the staging buffer: when each is free
    std::vector<Fill> fills;      // [class - 1]
    uint64_t next = 0;            // the access that is read ahead next
    uint64_t freed = 0;           // accesses before it hold no room
    double held = 0;              // MB read ahead
    std::vector<double> at;       // of accesses from `freed` on: when they are there
    Log wanted, ahead;            // reads from the source: at once, and ahead
  };
  struct Origin {
    double speed = 0;  // MB/s
    size_t index = 0;  // into Result::staged
    double since = 0;  // when it is there
  };

  size_t source() const { return classes_; }

  // What the decision keeps, before the training; returns when the last node is done.
  double fill_before() {
    double done = 0;
    for (uint32_t n = 0; n < nodes_.size() && !decision_.keep.empty(); ++n) {
      done = 0;
      for (size_t j = 1; j <= decision_.keep[n].size(); ++j) {
        std::vector<double>& threads = nodes_[n].fills[j - 1].threads;
        std::fill(threads.begin(), threads.end(), done);
        // First what comes from the source, then what comes from its owners.
        double mb[2] = {0, 0};
        for (const bool remote : {false, true}) {
          size_t turn = 0;
          for (const uint32_t s : decision_.keep[n][j - 1]) {
            if (remote != owned_elsewhere(n, s)) continue;
            const double speed = remote ? std::min(model_.network, class_read_[j]) : shares_.back();
            threads[turn] += sizes_[s] * (1 / speed + model_.stage_seconds());
            turn = (turn + 1) % threads.size();
            kept_.fill(n, s, *kept_.own(n, s), 0);
            mb[remote] += sizes_[s];
          }
          done = *std::max_element(threads.begin(), threads.end());
          std::fill(threads.begin(), threads.end(), done);
        }
        result_.kept_from_source += mb[0];
        result_.kept_from_nodes += mb[1];
      }
    }
    return done;
  }

  bool owned_elsewhere(uint32_t n, uint32_t sample) const {
    return !decision_.owner.empty() && decision_.owner[sample] != plan::kNoOwner &&
           decision_.owner[sample] != n;
  }

  // Goes on with the node's storage classes as far as they have room, no read before `time`.
  void fill_beside(uint32_t n, double time) {
    for (size_t j = 1; j <= decision_.keep[n].size(); ++j) {
      const auto& list = decision_.keep[n][j - 1];
      Fill& fill = nodes_[n].fills[j - 1];
      for (; fill.next < list.size(); ++fill.next) {
        const uint32_t sample = list[fill.next];
        if (decision_.cleanup && reads_left_[n][sample] == 0) continue;
        if (decision_.cleanup && fill.held + sizes_[sample] > model_.classes[j].capacity) break;
        double& clock = fill.threads[fill.turn];
        fill.turn = (fill.turn + 1) % fill.threads.size();
        const double write = model_.thread_write(j);
        const double store = write > 0 ? 1 / write : 0;
        clock = std::max(clock, time) +
                sizes_[sample] * (1 / shares_.back() + model_.stage_seconds() + store);
        fill.held += sizes_[sample];
        kept_.fill(n, sample, *kept_.own(n, sample), clock);
        result_.kept_from_source += sizes_[sample];
        result_.warm_seconds = std::max(result_.warm_seconds, clock);
      }
    }
  }

  double batch(uint64_t h, double start) {
    double end = start, slowest = 0;
    for (uint32_t n = 0; n < nodes_.size(); ++n) {
      const auto [first, last] = range(n, h);
      double time = start, mb = 0;
      for (uint64_t k = first; k < last; ++k) {
        const double size = sizes_[accesses_.samples[n][k]];
        mb += size;
        const double there = request(n, k, first, time);
        result_.node_stall[n] += there - time;
        time = there + size / model_.compute;
      }
      slowest = std::max(slowest, mb / model_.compute);
      end = std::max(end, time);
    }
    result_.compute_seconds.push_back(slowest + model_.step_seconds);
    return end + model_.step_seconds;
  }

  std::pair<uint64_t, uint64_t> range(uint32_t n, uint64_t h) const {
    return {h == 0 ? 0 : accesses_.ends[n][h - 1], accesses_.ends[n][h]};
  }

  // When access k of the node, wanted at `time` in the batch that begins with access `first`, is
  // there.
  double request(uint32_t n, uint64_t k, uint64_t first, double time) {
    if (decision_.loading == Loading::perfect) return time;
    Node& node = nodes_[n];
    const uint32_t sample = accesses_.samples[n][k];
    if (decision_.loading == Loading::staged && k == node.next) {
      // The training has come first: reading ahead goes on behind it.
      node.at.push_back(kNotYet);
      ++node.next;
    }
    double there = k < node.next ? std::max(time, node.at[k - node.freed]) : kNotYet;
    if (there > time) {
      const Origin best = fastest(n, sample, time);
      const double at_once = time + sizes_[sample] * (1 / best.speed + model_.stage_seconds());
      if (at_once < there) {
        there = at_once;
        if (best.index == source()) node.wanted.add(time);
        account(n, k, best);
        if (decision_.filling == Filling::reading) keep_what_was_read(n, sample, best, there);
      }
    }
    if (decision_.loading == Loading::staged) {
      free_before(n, first);
      if (decision_.cleanup) consume(n, sample, there);
      read_ahead(n, there);
    }
    return there;
  }

  // Makes room for what comes after: the accesses before `first` are consumed.
  void free_before(uint32_t n, uint64_t first) {
    Node& node = nodes_[n];
    const uint64_t end = std::min(first, node.next);
    if (end <= node.freed) return;
    for (uint64_t k = node.freed; k < end; ++k) {
      if (node.at[k - node.freed] < kNotYet) node.held -= sizes_[accesses_.samples[n][k]];
    }
    node.at.erase(node.at.begin(), node.at.begin() + static_cast<ptrdiff_t>(end - node.freed));
    node.freed = end;
  }

  // Reads ahead until the staging buffer is full, no read before `time`.
  void read_ahead(uint32_t n, double time) {
    Node& node = nodes_[n];
    const auto& samples = accesses_.samples[n];
    for (double& clock : node.threads) clock = std::max(clock, time);
    for (; node.next < samples.size(); ++node.next) {
      const uint32_t sample = samples[node.next];
      const double size = sizes_[sample];
      if (node.held + size > model_.classes[0].capacity) return;
      double& clock = node.threads[turn_];
      turn_ = (turn_ + 1) % node.threads.size();
      const Origin origin = staging_origin(n, sample, clock);
      if (origin.speed == 0) {
        node.at.push_back(kNotYet);
        continue;
      }
      if (origin.index == source()) node.ahead.add(clock);
      account(n, node.next, origin);
      clock = std::max(clock, origin.since) + size * (1 / origin.speed + model_.stage_seconds());
      node.at.push_back(clock);
      node.held += size;
      if (decision_.filling == Filling::reading) keep_what_was_read(n, sample, origin, clock);
    }
  }

  // Where the staging buffer is filled from; speed 0: from nowhere.
  Origin staging_origin(uint32_t n, uint32_t sample, double time) const {
    // Without the source, a copy that is to come is waited for.
    const double latest = decision_.stage_source ? time : std::numeric_limits<double>::max();
    Origin best = kept_origin(n, sample, latest, decision_.stage_remote);
    if (decision_.stage_source) prefer_source(n, time, best);
    return best;
  }

  // The fastest origin at `time` [Böhringer 2020, eq. 3.5 to 3.7].
  Origin fastest(uint32_t n, uint32_t sample, double time) const {
    Origin best = kept_origin(n, sample, time, true);
    prefer_source(n, time, best);
    return best;
  }

  // The faster of the node's own copy and another node's, of those that are there until `latest`.
  Origin kept_origin(uint32_t n, uint32_t sample, double latest, bool remote) const {
    Origin best;
    if (const auto own = kept_.own(n, sample); own && own->since <= latest) {
      best = {class_read_[own->storage_class], own->storage_class - 1, own->since};
    }
    if (!remote) return best;
    if (const auto other = kept_.remote(sample, latest); other && other->node != n) {
      const double speed = std::min(model_.network, class_read_[other->storage_class]);
      if (speed > best.speed) best = {speed, classes_ - 1, other->since};
    }
    return best;
  }

  void prefer_source(uint32_t n, double time, Origin& best) const {
    if (best.speed >= largest_share_) return;
    const double speed = shares_[clients(n, time) - 1];
    if (speed > best.speed) best = {speed, source(), 0};
  }

  // gamma: nodes that have read from the source at `time` or later, and this one.
  uint32_t clients(uint32_t n, double time) const {
    uint32_t count = 1;
    for (uint32_t other = 0; other < nodes_.size(); ++other) {
      const Node& node = nodes_[other];
      count += other != n && (node.wanted.has_since(time) || node.ahead.has_since(time));
    }
    return count;
  }

  // Filling::reading: the reader's own copy and, of what came from the source, the owner's.
  void keep_what_was_read(uint32_t n, uint32_t sample, const Origin& origin, double time) {
    keep_read(n, n, sample, time);
    if (origin.index == source() && owned_elsewhere(n, sample)) {
      keep_read(decision_.owner[sample], n, sample, time);
    }
  }

  // `by` has read the sample, and hands it to node `n` if that is to keep it.
  void keep_read(uint32_t n, uint32_t by, uint32_t sample, double time) {
    const auto copy = kept_.own(n, sample);
    if (!copy || copy->since != kNotYet) return;
    const double there = n == by ? time : time + sizes_[sample] / model_.network;
    kept_.fill(n, sample, *copy, there);
    result_.warm_seconds = std::max(result_.warm_seconds, there);
  }

  // cleanup_read: what the node will not read again makes room.
  void consume(uint32_t n, uint32_t sample, double time) {
    if (--reads_left_[n][sample] > 0) return;
    const auto copy = kept_.own(n, sample);
    if (!copy || copy->since > time) return;
    kept_.drop(n, sample, *copy);
    nodes_[n].fills[copy->storage_class - 1].held -= sizes_[sample];
    fill_beside(n, time);
  }

  void account(uint32_t n, uint64_t k, const Origin& origin) {
    const double size = sizes_[accesses_.samples[n][k]];
    result_.staged[origin.index] += size;
    const uint64_t of_epoch = accesses_.samples[n].size() / epochs_;
    if (origin.index == source()) result_.epoch_source[k / of_epoch] += size;
  }

  const Model& model_;
  const Decision& decision_;
  const std::span<const double> sizes_;
  const uint32_t epochs_;
  const size_t classes_;  // class 0 included; also the index of the source in Result::staged
  const Accesses accesses_;
  Kept kept_;
  std::vector<double> shares_;  // [gamma - 1]
  double largest_share_ = 0;
  std::vector<double> class_read_;  // [class]: r_j(p_j)
  std::vector<Node> nodes_;
  size_t turn_ = 0;  // the thread of the staging buffers that reads next
  std::vector<std::vector<uint32_t>> reads_left_;
  Result result_;
};

}  // namespace

Result published(const Model& model, const plan::JobSpec& spec, std::span<const double> sizes,
                 const Decision& decision) {
  check(model, spec, sizes, decision);
  if (decision.filling == Filling::evicting || !decision.copies.empty()) {
    throw Error(ErrorKind::usage, "mode as-published has no eviction: run mode consistent");
  }
  return Published(model, spec, sizes, decision).run();
}

}  // namespace nostall::simulate
