// Plans what this node keeps, and attaches to its cache. With several nodes, owners are chosen
// first (plan/owners.h) and then each node's placement. Chunks of sub-batches have a part of the RAM
// tier (plan/chunks.h), and what is placed has the rest. The first rank of a node judges what kept
// tiers hold: the times of the files that hold the samples decide whether they are of today's
// content, and where those are not known, a probe of samples against the source.
#include "stage/node.h"

#include <algorithm>
#include <bit>
#include <map>

#include "base/fnv.h"
#include "base/log.h"
#include "plan/cluster.h"
#include "plan/mixture.h"
#include "source/sums.h"
#include "tier/names.h"

namespace nostall::stage {
namespace {

// Placement looks at all epochs of a job, but only at the next few if there are many or their
// number is unknown. That costs as much as for a short job, and access counts differ little later
// on.
constexpr uint32_t kMostEpochs = 1024, kEpochsAhead = 16;

plan::JobSpec placed_job(const plan::JobSpec& job, plan::Position begin) {
  plan::JobSpec near = job;
  if (job.epochs > kMostEpochs) {
    near.epochs =
        static_cast<uint32_t>(std::min<uint64_t>(job.epochs, uint64_t{begin.epoch} + kEpochsAhead));
  }
  return near;
}

// The epochs that owners follow from. Where only a few are looked at: the job's first, which a job
// that resumes looks at again, if each of them reads all samples.
plan::Epochs owned_epochs(const plan::JobSpec& job, const plan::JobSpec& near,
                          plan::Position begin) {
  if (job.epochs <= kMostEpochs) return {0, job.epochs};
  const uint32_t first = plan::repeats_or_leaves_out(job) ? begin.epoch : 0;
  return {first, std::min(near.epochs, first + kEpochsAhead)};
}

// Where the accesses begin that decide what is placed: a tier that is kept is for the next job too, which
// reads all of an epoch.
plan::Position placed_from(const NodeSpec& node, plan::Position begin) {
  const auto keeps = [](const std::vector<tier::TierSpec>& tiers) {
    return std::ranges::any_of(tiers, &tier::TierSpec::keep);
  };
  const bool any = keeps(node.tiers) || std::ranges::any_of(node.all_tiers, keeps);
  return any ? plan::Position{begin.epoch, 0} : begin;
}

// Batches that ranks of a node may be apart and still leave each other's copies: those of two epochs. What
// is later by more is of before the job went back.
uint32_t copy_lead(const plan::JobSpec& job) {
  return static_cast<uint32_t>(
      std::clamp<uint64_t>(2 * plan::batches_per_epoch(job), 1, uint64_t{1} << 31));
}

const char* name_of(plan::OrderKind order) {
  switch (order) {
    case plan::OrderKind::torch:
      return "torch";
    case plan::OrderKind::keyed:
      return "keyed";
    case plan::OrderKind::user:
      return "user";
    case plan::OrderKind::sequential:
      return "sequential";
    case plan::OrderKind::sub_batch:
      return "sub-batch";
    case plan::OrderKind::weighted:
      return "weighted";
    case plan::OrderKind::repeated:
      return "repeated";
    case plan::OrderKind::mixture:
      return "mixture";
    case plan::OrderKind::bucketed:
      return "bucketed";
  }
  return "unknown";
}

// The arguments of a rank as "name=value" lines, with the names of DataLoader's arguments.
std::string arguments_of(const plan::JobSpec& job, const source::Source& source,
                         const NodeSpec& node, plan::Position begin) {
  std::string text;
  const auto line = [&text](const char* name, const std::string& value) {
    // Paths may hold anything.
    std::string shown = value.substr(0, 200);
    std::replace(shown.begin(), shown.end(), '\n', '?');
    text += std::string(name) + "=" + shown + "\n";
  };
  line("samples", std::to_string(source.size()));
  line("bytes of the data set", std::to_string(source.total_bytes()));
  // Not its name: to describe a sample may take reads.
  line("fingerprint of the data set", std::to_string(source.fingerprint()));
  // Of all ranks: a share may be the same where the whole is not.
  line("global_batch_size", std::to_string(job.global_batch));
  line("epochs", std::to_string(job.epochs));
  line("steps", std::to_string(job.steps));
  line("seed", std::to_string(job.seed));
  line("world_size", std::to_string(job.world));
  line("world of the order", std::to_string(job.order_world));
  line("drop_last", job.drop_last ? "True" : "False");
  std::string order = name_of(job.order);
  if (job.order == plan::OrderKind::user) {
    Fnv hash;
    hash.number(job.user_order->size());
    for (const plan::SampleId id : *job.user_order) hash.number(id);
    order += " ids, hash " + std::to_string(hash.value());
  } else if (job.order == plan::OrderKind::sub_batch) {
    order += " " + std::to_string(job.sub_batches.reuse) + "x" +
             std::to_string(job.sub_batches.resident) + "x" +
             std::to_string(job.sub_batches.together);
  } else if (job.order == plan::OrderKind::weighted) {
    Fnv hash;
    for (const double weight : *job.weights) hash.number(std::bit_cast<uint64_t>(weight));
    order += " " + std::to_string(job.draws) + (job.replacement ? " with" : " without") +
             " replacement, hash of weights " + std::to_string(hash.value());
  } else if (job.order == plan::OrderKind::repeated) {
    order += " " + std::to_string(job.times) + " times";
  } else if (job.order == plan::OrderKind::mixture) {
    order += " of " + std::to_string(job.draws) + " samples, hash " +
             std::to_string(job.mixture->fingerprint());
  } else if (job.order == plan::OrderKind::bucketed) {
    Fnv hash;
    for (const uint32_t bucket : *job.buckets) hash.word(bucket);
    order += ", hash of buckets " + std::to_string(hash.value());
  }
  line("order", order);
  line("scheme", std::to_string(static_cast<int>(job.scheme)));
  line("states loaded", std::to_string(node.loads));
  line("first batch", std::to_string(begin.batch) + " of epoch " + std::to_string(begin.epoch));
  std::string tiers;
  for (const tier::TierSpec& spec : node.tiers) {
    tiers += (tiers.empty() ? "" : ", ") +
             (spec.kind == tier::TierKind::ram ? std::string("ram") : spec.path) + ":" +
             std::to_string(spec.capacity) + (spec.keep ? ":keep" : "");
  }
  line("tiers", tiers);
  return text;
}

// Removes the records of a manifest that are not of the data set as it is now: all of them if its
// files have other times, or if the probe shows another version.
void keep_this_content(const tier::TierSpec& spec, const source::Source& source,
                       tier::Manifest& manifest) {
  std::vector<tier::KeptRecord>& records = manifest.records;
  if (records.empty()) return;
  const bool same = manifest.stamp == source.stamp();
  if (!same && source.stamp_covers_samples()) {
    log(LogLevel::warning, spec.path +
                               ": the kept tier was filled when the files of the data set lay "
                               "elsewhere or had other times; it starts empty");
    records.clear();
    return;
  }
  std::vector<source::KnownSum> drawn;
  for (const uint64_t i : source::draw(source, records.size(), same)) {
    drawn.push_back({records[i].sample, records[i].sum});
  }
  const source::Probe seen = source::probe(source, drawn, same);
  if (source::another_version(seen, same)) {
    log(LogLevel::warning, spec.path + ": the kept tier is of another version of the data set (" +
                               std::to_string(seen.different) + " of " +
                               std::to_string(seen.compared) + " samples differ); it starts empty");
    records.clear();
  } else if (!same) {
    const std::string file = tier::kept_file_name(spec.path, source.fingerprint());
    log(LogLevel::warning, spec.path +
                               ": the kept tier was filled when the data set lay elsewhere or its "
                               "directories had other times; it is used, for none of " +
                               std::to_string(seen.compared) + " samples differs of " +
                               std::to_string(records.size()) +
                               " that it holds: if others were changed, remove " + file + " and " +
                               tier::manifest_name(file) + " and start again");
  }
  std::erase_if(records, [&](const tier::KeptRecord& r) {
    const uint32_t sum = source.sums().of(r.sample);
    return sum != 0 && sum != r.sum;
  });
}

std::vector<plan::TierShape> shapes_of(std::span<const tier::TierSpec> tiers) {
  std::vector<plan::TierShape> shapes;
  for (const tier::TierSpec& spec : tiers) {
    shapes.push_back({spec.capacity, tier::record_overhead(spec.kind)});
  }
  return shapes;
}

// What the other nodes keep under Sharing::hdmlp, and which node this one fetches each sample from.
void find_copies(const plan::JobSpec& job, std::span<const uint64_t> sizes, const NodeSpec& node,
                 plan::Position begin, NodeTiers& into) {
  std::vector<std::vector<plan::TierShape>> shapes;
  for (const std::vector<tier::TierSpec>& tiers : node.all_tiers)
    shapes.push_back(shapes_of(tiers));
  into.copies = plan::copies_of_others(job, sizes, node.nodes, shapes, node.node, begin);
  into.ownership.owner = into.copies.node;
  into.ownership.first_reader.assign(sizes.size(), plan::kNoOwner);
  into.ownership.first_access.assign(sizes.size(), plan::kNever);
}

// A node, as far as it says what is kept of chunks of sub-batches there.
struct ChunkNode {
  uint32_t first_rank = 0, ranks = 0;
  std::vector<tier::TierSpec> tiers;
};

// The nodes of a job that has chunks; one that shares nothing with others is the only one.
std::vector<ChunkNode> chunk_nodes(uint32_t first_rank, uint32_t ranks, const NodeSpec& node) {
  if (node.nodes.capacity.empty()) return {{first_rank, ranks, node.tiers}};
  std::vector<ChunkNode> nodes;
  for (uint32_t n = 0; n < node.all_tiers.size(); ++n) {
    const auto begin = node.nodes.of_rank.begin(), end = node.nodes.of_rank.end();
    nodes.push_back({static_cast<uint32_t>(std::find(begin, end, n) - begin),
                     static_cast<uint32_t>(std::count(begin, end, n)), node.all_tiers[n]});
  }
  return nodes;
}

// What each node takes of its first RAM tier for chunks, and has less for what it owns; nothing where
// everything that is read can stay for the whole job anyway. Those of node number `here`.
tier::Halves take_halves(const plan::JobSpec& job, std::span<const uint64_t> sizes,
                         const plan::NodeAccess& access, plan::Position begin, uint32_t here,
                         std::span<const ChunkNode> chunked, plan::Nodes& nodes) {
  uint64_t wanted = 0, room = 0;
  for (uint64_t s = 0; s < sizes.size(); ++s) {
    if (access.frequency[s] > 0 || chunked.size() > 1) wanted += sizes[s];
  }
  for (const ChunkNode& node : chunked) {
    for (const tier::TierSpec& spec : node.tiers) room += spec.capacity;
  }
  if (wanted <= room) return {};
  tier::Halves found;
  std::map<std::pair<uint32_t, uint64_t>, plan::HalfShape> known;  // by ranks and capacity
  for (uint32_t n = 0; n < chunked.size(); ++n) {
    const ChunkNode& node = chunked[n];
    const auto ram = std::ranges::find(node.tiers, tier::TierKind::ram, &tier::TierSpec::kind);
    if (ram == node.tiers.end()) continue;
    // Nodes alike have halves alike: their chunks differ little.
    const auto [at, fresh] = known.try_emplace({node.ranks, ram->capacity});
    if (fresh) {
      at->second =
          plan::Chunks(job, node.first_rank, node.ranks, sizes).shape(ram->capacity, begin.epoch);
    }
    if (n < nodes.capacity.size()) nodes.capacity[n] -= 2 * at->second.bytes;
    if (n == here || chunked.size() == 1) {
      found = {static_cast<size_t>(ram - node.tiers.begin()), at->second};
    }
  }
  return found;
}

uint64_t fingerprint_of(const plan::JobSpec& job, const source::Source& source,
                        const NodeSpec& node, Sharing sharing, plan::Position begin) {
  Fnv hash(plan::fingerprint(job));
  hash.number(begin.epoch).number(begin.batch).number(static_cast<uint64_t>(sharing));
  hash.number(static_cast<uint64_t>(node.copies));
  for (const uint32_t of : node.nodes.of_rank) hash.number(of);
  for (const uint64_t capacity : node.nodes.capacity) hash.number(capacity);
  return hash.number(source.fingerprint()).value();
}

}  // namespace

NodeTiers attach_node_cache(const plan::JobSpec& job, uint32_t rank, const source::Source& source,
                            const NodeSpec& node, Sharing sharing, plan::Position begin) {
  if (node.local_world == 0 || node.local_rank >= node.local_world || node.local_rank > rank) {
    throw Error(ErrorKind::usage, "local rank " + std::to_string(node.local_rank) + " of " +
                                      std::to_string(node.local_world) + " does not go with rank " +
                                      std::to_string(rank) +
                                      ": ranks of a node must be numbered consecutively");
  }
  std::vector<plan::TierShape> shapes = shapes_of(node.tiers);
  bool any =
      std::any_of(shapes.begin(), shapes.end(), [](auto shape) { return shape.capacity > 0; });
  // A node without tiers among others fetches what they keep.
  any = any || !node.nodes.capacity.empty();
  if (!any || source.size() == 0) return {};

  const uint32_t first_rank = rank - node.local_rank;
  const uint32_t ranks = std::min(node.local_world, job.world - first_rank);
  const plan::JobSpec near = placed_job(job, begin);
  plan::NodeAccess access = plan::node_access(near, first_rank, ranks, placed_from(node, begin));
  access.whole = near.epochs == job.epochs;
  NodeTiers attached;
  tier::Halves halves;
  plan::Nodes nodes = node.nodes;
  if (plan::has_chunks(near) && sharing == Sharing::push && !node.locality) {
    const std::vector<ChunkNode> chunked = chunk_nodes(first_rank, ranks, node);
    halves = take_halves(near, source.sizes(), access, begin, node.node, chunked, nodes);
  }
  if (halves.shape.places > 0) {
    attached.chunks = std::make_shared<const plan::Chunks>(job, first_rank, ranks, source.sizes());
    attached.half = halves.shape;
    shapes[halves.tier].capacity -= 2 * halves.shape.bytes;
  }
  if (!node.nodes.capacity.empty()) {
    for (uint32_t r = 0; r < node.nodes.of_rank.size(); ++r) {
      if ((node.nodes.of_rank[r] == node.node) != (r >= first_rank && r < first_rank + ranks)) {
        throw Error(ErrorKind::usage, "rank " + std::to_string(r) +
                                          " breaks the row of ranks of node " +
                                          std::to_string(node.nodes.of_rank[r]) +
                                          ": ranks of a node must be numbered consecutively");
      }
    }
    if (sharing == Sharing::hdmlp) {
      find_copies(near, source.sizes(), node, placed_from(node, begin), attached);
    } else {
      // What a record takes differs a little between kinds of tier; the owner must have room in any.
      std::vector<uint64_t> records(source.sizes().begin(), source.sizes().end());
      for (uint64_t& bytes : records) bytes += tier::record_overhead(tier::TierKind::file);
      attached.ownership =
          plan::owners(near, records, nodes, begin, owned_epochs(job, near, begin));
    }
    attached.plan = fingerprint_of(job, source, node, sharing, begin);
  }
  tier::NodeCacheConfig config;
  config.halves = halves;
  config.job = node.job;
  config.local_rank = node.local_rank;
  config.local_world = node.local_world;
  config.any_member = node.any_member;
  config.dataset = source.fingerprint();
  config.plan = Fnv(plan::fingerprint(job)).number(begin.epoch).number(begin.batch).value();
  config.loads = node.loads;
  config.waiting = node.waiting;
  config.arguments = arguments_of(job, source, node, begin);
  config.tiers = node.tiers;
  config.stamp = source.stamp();
  config.files_stamp = source.files_stamp();
  config.listing = source.shareable();
  config.judge = [&source](const tier::TierSpec& spec, tier::Manifest& kept) {
    keep_this_content(spec, source, kept);
  };
  attached.cache = tier::NodeCache::attach(
      config, source.sizes(), [&](std::span<const std::vector<plan::Resident>> kept) {
        plan::Placement placement;
        if (node.nodes.capacity.empty() || sharing == Sharing::hdmlp) {
          placement = plan::place(source.sizes(), access, shapes, kept);
        } else {
          // Halves have the room where there are any.
          const plan::CopyRule copies = attached.chunks ? plan::CopyRule::fixed : node.copies;
          const auto ram =
              std::ranges::find(node.tiers, tier::TierKind::ram, &tier::TierSpec::kind);
          placement =
              plan::place_cluster(source.sizes(), attached.ownership, node.node, access, shapes,
                                  copies, static_cast<size_t>(ram - node.tiers.begin()), kept);
          placement.copy_lead = copy_lead(job);
          attached.places = placement.copies;
        }
        if (sharing == Sharing::hdmlp) attached.fill = placement.fill;
        return placement;
      });
  attached.cache->sums().learn(source.sums());
  return attached;
}

}  // namespace nostall::stage
