// simulate/decision.h - what a policy decides: where samples are kept, how they get there, what is
// read.
//
// Thread-safety: values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/cluster.h"
#include "plan/owners.h"
#include "plan/plan.h"

namespace nostall::simulate {

enum class Loading : uint8_t {
  perfect,    // every sample is there at once: the lower bound
  on_demand,  // read when it is wanted, neither ahead nor beside the computation
  staged,     // read ahead into the staging buffer in the order of the accesses
};

enum class Filling : uint8_t {
  none,      // nothing is kept
  prefetch,  // each node's threads fetch what it keeps, in the order of its lists (HDMLP)
  reading,   // a read for the staging buffer fills the reader's copy and, from the source, the
             // owner's (nostall; LBANN's dynamic store, where the owner reads first)
  evicting,  // each node keeps what it reads, and makes room by what it needs last of what another node
             // has too (held.h); in mode consistent alone. Keeps no lists
  before,  // everything kept is fetched before the training begins; as published, what the
           // decision's owners keep elsewhere comes from there
};

struct Decision {
  Loading loading = Loading::staged;
  Filling filling = Filling::none;
  // [node][class - 1]: the samples that the node keeps in that storage class, in fill order.
  std::vector<std::vector<std::vector<uint32_t>>> keep;
  // Filling::reading: the node that gets what was read from the source, plan::kNoOwner for none.
  std::vector<uint32_t> owner;
  // [node]: places of class 1 beside its lists, for copies of what others own by when the node needs
  // them next (plan/copies_by_use.h). Filling::reading in mode consistent only.
  std::vector<plan::CopyPlaces> copies;
  // As-published alone: whether the staging buffer is filled from other nodes and from the source as
  // well as from the node's own classes. A sample that it cannot be filled with is read when it is
  // wanted, from anywhere.
  bool stage_remote = true;
  bool stage_source = true;
  // Drop a kept sample after the node's own last access; the lists may then hold more than fits,
  // and go on as room comes free. Filling::prefetch only.
  bool cleanup = false;
  // [epoch * nodes + node]: what the node reads instead of its share of the plan's order; empty:
  // the plan's order. As many samples as the plan gives the node.
  std::vector<std::vector<uint32_t>> order;
};

// HDMLP [Böhringer 2020, sec. 3.2.2]: each node keeps what it reads most often, placed by the
// loader's own rule. Fill order is that of first access, or with in_order = false that of the
// access frequency. `bytes` has one entry per sample, `capacities` one per class (class 1 on), in
// bytes. O(nodes * (F + epochs * F)), with OrderKind::keyed O(nodes * F + epochs * F).
Decision keep_frequent(const plan::JobSpec& spec, std::span<const uint64_t> bytes,
                       std::span<const uint64_t> capacities, bool in_order);

// nostall: owners and copies as the loader places them (plan/cluster.h), filled by the first read.
Decision keep_owned(const plan::JobSpec& spec, std::span<const uint64_t> bytes,
                    std::span<const uint64_t> capacities,
                    plan::CopyRule copies = plan::CopyRule::fixed);

// The node that reads each sample first; plan::kNoOwner if none does. Shape (F,).
std::vector<uint32_t> first_readers(const plan::JobSpec& spec);

// Every node reads nothing but what it keeps: the plan's order with each sample replaced by the
// next one of a fresh shuffle of the node's own (DeepIO's opportunistic mode, parallel staging).
// A node that keeps nothing keeps the plan's order.
void read_own_only(const plan::JobSpec& spec, Decision& decision);

// Samples of each global batch to the nodes that keep them first (locality-aware loading).
void read_local_first(const plan::JobSpec& spec, Decision& decision);

}  // namespace nostall::simulate
