// The state machine of the allreduce between nodes; node_allreduce.h explains the algorithm.
//
// A chunk is opened when its messages may be expected, contributed to when this node's sum of it is
// ready, and finished when all shares of it have been received.
#include "collective/node_allreduce.h"

#include <algorithm>
#include <utility>

namespace nostall::collective {

Extent part_of(uint64_t count, uint32_t part, uint32_t parts) noexcept {
  const uint64_t each = count / parts, more = count % parts;
  return {part * each + std::min<uint64_t>(part, more), each + (part < more ? 1 : 0)};
}

std::vector<bool> late_ranks(const std::vector<std::vector<bool>>& seen, uint32_t late) {
  std::vector<bool> found(seen.size(), false);
  uint32_t many = 0;
  for (size_t rank = 0; rank < seen.size(); ++rank) {
    uint32_t by = 0;
    for (size_t other = 0; other < seen.size(); ++other) {
      by += other != rank && seen[other][rank] ? 1 : 0;
    }
    found[rank] = by < late;
    many += by < late ? 1 : 0;
  }
  if (many > 2 * late || many == seen.size()) std::fill(found.begin(), found.end(), false);
  return found;
}

NodeAllreduce::NodeAllreduce(const NodeAllreduceShape& shape, Messages& messages,
                             const std::byte* in, std::byte* out,
                             std::function<void(uint32_t)> finished)
    : shape_(shape),
      messages_(messages),
      in_(in),
      out_(out),
      finished_(std::move(finished)),
      seen_(shape.ranks, std::vector<bool>(shape.ranks, false)),
      rows_(messages.words(uint64_t{shape.ranks} * shape.ranks)),
      present_(shape.ranks, false),
      sendable_(shape.ranks, false),
      late_(shape.ranks, false),
      place_(shape.ranks, 0),
      chunks_(shape.chunks) {}

Extent NodeAllreduce::share_of(uint32_t chunk, uint32_t rank) const noexcept {
  const Extent all = this->chunk(chunk);
  const Extent part = part_of(all.count, rank, shape_.ranks);
  return {all.begin + part.begin, part.count};
}

Extent NodeAllreduce::extra_of(uint32_t chunk, uint32_t late_rank, uint32_t place) const noexcept {
  const Extent all = share_of(chunk, late_rank);
  const Extent part = part_of(all.count, place, static_cast<uint32_t>(owners_.size()));
  return {all.begin + part.begin, part.count};
}

Extent NodeAllreduce::piece_of(uint32_t chunk, uint32_t owner, uint32_t rank) const noexcept {
  const Extent all = share_of(chunk, owner);
  const uint32_t place = rank < owner ? rank : rank - 1;
  const Extent part = part_of(all.count, place, shape_.ranks - 1);
  return {all.begin + part.begin, part.count};
}

uint64_t NodeAllreduce::extra_count(uint32_t chunk, uint32_t place) const noexcept {
  uint64_t count = 0;
  for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    if (late_[rank]) count += extra_of(chunk, rank, place).count;
  }
  return count;
}

void NodeAllreduce::gather_extra(uint32_t chunk, uint32_t place, std::byte* into) {
  for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    if (!late_[rank]) continue;
    const Extent part = extra_of(chunk, rank, place);
    messages_.copy(into, in_ + part.begin * shape_.element, part.count * shape_.element);
    into += part.count * shape_.element;
  }
}

void NodeAllreduce::scatter_extra(uint32_t chunk, uint32_t place, const std::byte* from) {
  for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    if (!late_[rank]) continue;
    const Extent part = extra_of(chunk, rank, place);
    messages_.copy(out_ + part.begin * shape_.element, from, part.count * shape_.element);
    from += part.count * shape_.element;
  }
}

void NodeAllreduce::listen() {
  for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    if (rank == shape_.rank) continue;
    expect(rank, announcement, 0, &rows_[size_t{rank} * shape_.ranks], shape_.ranks);
  }
}

void NodeAllreduce::announce() {
  const uint32_t me = shape_.rank;
  for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    rows_[size_t{me} * shape_.ranks + rank] = present_[rank] ? 1 : 0;
  }
  for (uint32_t i = 1; i < shape_.ranks; ++i) {
    const uint32_t rank = (me + i) % shape_.ranks;
    messages_.send(rank, tag(announcement, 0), &rows_[size_t{me} * shape_.ranks], shape_.ranks);
  }
  while (opened_ < std::min(shape_.window, shape_.chunks)) open(opened_++);
  arrived(me);
}

void NodeAllreduce::open(uint32_t c) {
  Chunk& chunk = chunks_[c];
  const uint32_t me = shape_.rank;
  const Extent own = share_of(c, me);
  chunk.open = true;
  chunk.sent.assign(shape_.ranks, false);
  chunk.contributions.assign(shape_.ranks, nullptr);
  chunk.own.into = out_ + own.begin * shape_.element;
  chunk.missing = 1;  // the decision
  for (uint32_t i = 1; i < shape_.ranks; ++i) {
    const uint32_t rank = (me + shape_.ranks - i) % shape_.ranks;
    chunk.contributions[rank] = messages_.scratch(own.count * shape_.element);
    expect(rank, contribution, c, chunk.contributions[rank], own.count * shape_.element);
  }
  if (decided_) expect_results(c);
  if (chunk.ready) brought(c);
  if (decided_) one_less(c);
}

// All others may send to `rank` at once unless it may turn out to be among the last.
void NodeAllreduce::arrived(uint32_t rank) {
  present_[rank] = true;
  ++present_count_;
  for (uint32_t other = 0; other < shape_.ranks; ++other) {
    seen_[rank][other] = rows_[size_t{rank} * shape_.ranks + other] != 0;
  }
  if (shape_.ranks - present_count_ >= shape_.late) sendable_[rank] = true;
  for (uint32_t c = 0; c < shape_.chunks; ++c) contribute(c, rank);
  if (present_count_ == shape_.ranks) decide();
}

void NodeAllreduce::decide() {
  late_ = late_ranks(seen_, shape_.late);
  decided_ = true;
  for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    place_[rank] = static_cast<uint32_t>(owners_.size());
    if (!late_[rank]) owners_.push_back(rank);
  }
  for (uint32_t c = 0; c < shape_.chunks; ++c) {
    if (!chunks_[c].open || chunks_[c].expecting) continue;
    expect_results(c);
    for (uint32_t i = 1; i < shape_.ranks; ++i) contribute(c, (shape_.rank + i) % shape_.ranks);
    if (chunks_[c].ready) contribute_extra(c);
    own_complete(c);
    one_less(c);
  }
}

void NodeAllreduce::expect_results(uint32_t c) {
  Chunk& chunk = chunks_[c];
  chunk.expecting = true;
  const uint32_t me = shape_.rank;
  const bool extras = owners_.size() < shape_.ranks;
  if (extras) chunk.extra_shares.assign(shape_.ranks, nullptr);
  for (const uint32_t owner : owners_) {
    if (owner == me) continue;
    const Extent part = share_of(c, owner);
    expect(owner, share, c, out_ + part.begin * shape_.element, part.count * shape_.element);
    ++chunk.missing;
    if (!extras) continue;
    const uint64_t bytes = extra_count(c, place_[owner]) * shape_.element;
    chunk.extra_shares[owner] = messages_.scratch(bytes);
    expect(owner, extra_share, c, chunk.extra_shares[owner], bytes);
    ++chunk.missing;
  }
  if (late_[me]) return;
  ++chunk.missing;  // my share
  if (!extras) return;
  ++chunk.missing;
  const uint64_t bytes = extra_count(c, place_[me]) * shape_.element;
  chunk.extra.into = messages_.scratch(bytes);
  chunk.extras.assign(shape_.ranks, nullptr);
  for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
    if (rank == me) continue;
    chunk.extras[rank] = messages_.scratch(bytes);
    expect(rank, extra, c, chunk.extras[rank], bytes);
  }
}

void NodeAllreduce::contribute(uint32_t c, uint32_t rank) {
  Chunk& chunk = chunks_[c];
  if (rank == shape_.rank || !chunk.open || !chunk.ready || chunk.sent[rank]) return;
  if (!present_[rank]) return;
  if (!decided_ && !sendable_[rank]) return;
  const Extent part = share_of(c, rank);
  chunk.sent[rank] = true;
  messages_.send(rank, tag(contribution, c), in_ + part.begin * shape_.element,
                 late_[rank] ? 0 : part.count * shape_.element);
}

void NodeAllreduce::contribute_extra(uint32_t c) {
  if (owners_.size() == shape_.ranks) return;
  Chunk& chunk = chunks_[c];
  for (uint32_t i = 1; i <= shape_.ranks; ++i) {
    const uint32_t rank = (shape_.rank + i) % shape_.ranks;
    if (late_[rank]) continue;
    const uint64_t count = extra_count(c, place_[rank]);
    std::byte* packed = messages_.scratch(count * shape_.element);
    gather_extra(c, place_[rank], packed);
    if (rank == shape_.rank) {
      add(chunk.extra, packed, count, rank);
      extra_complete(c);
    } else {
      messages_.send(rank, tag(extra, c), packed, count * shape_.element);
    }
  }
}

void NodeAllreduce::add(Sum& sum, const std::byte* from, uint64_t count, uint32_t rank) {
  if (!shape_.in_order) {
    messages_.fold(sum.into, from, count, sum.added == 0);
    ++sum.added;
    return;
  }
  sum.waiting.resize(shape_.ranks, nullptr);
  sum.received.resize(shape_.ranks, false);
  sum.waiting[rank] = from;
  sum.received[rank] = true;
  while (sum.next < shape_.ranks && sum.received[sum.next]) {
    messages_.fold(sum.into, sum.waiting[sum.next++], count, sum.added == 0);
    ++sum.added;
  }
}

void NodeAllreduce::ready(uint32_t c) {
  chunks_[c].ready = true;
  if (chunks_[c].open) brought(c);
}

void NodeAllreduce::brought(uint32_t c) {
  Chunk& chunk = chunks_[c];
  const uint32_t me = shape_.rank;
  const Extent part = share_of(c, me);
  for (uint32_t i = 1; i < shape_.ranks; ++i) contribute(c, (me + i) % shape_.ranks);
  if (!late_[me]) {
    chunk.mine_last = shape_.ranks > 2 && chunk.own.added + 1 == shape_.ranks;
    add(chunk.own, in_ + part.begin * shape_.element, part.count, me);
    own_complete(c);
  }
  if (decided_) contribute_extra(c);
}

// My share's sum goes to all, once it is known that the share is mine.
void NodeAllreduce::own_complete(uint32_t c) {
  Chunk& chunk = chunks_[c];
  const uint32_t me = shape_.rank;
  if (!decided_ || late_[me] || chunk.own.added != shape_.ranks) return;
  const Extent whole = share_of(c, me);
  const bool in_pieces = chunk.mine_last && whole.count >= shape_.ranks;
  for (uint32_t i = 1; i < shape_.ranks; ++i) {
    const uint32_t rank = (me + i) % shape_.ranks;
    const Extent part = in_pieces ? piece_of(c, me, rank) : whole;
    messages_.send(rank, tag(share, c), out_ + part.begin * shape_.element,
                   part.count * shape_.element);
  }
  chunk.own.added = shape_.ranks + 1;
  one_less(c);
}

void NodeAllreduce::extra_complete(uint32_t c) {
  Chunk& chunk = chunks_[c];
  if (chunk.extra.added != shape_.ranks) return;
  const uint32_t me = shape_.rank;
  const uint64_t bytes = extra_count(c, place_[me]) * shape_.element;
  for (uint32_t i = 1; i < shape_.ranks; ++i) {
    messages_.send((me + i) % shape_.ranks, tag(extra_share, c), chunk.extra.into, bytes);
  }
  scatter_extra(c, place_[me], chunk.extra.into);
  one_less(c);
}

void NodeAllreduce::share_came(uint32_t c, uint32_t from, uint64_t bytes) {
  Chunk& chunk = chunks_[c];
  const uint32_t me = shape_.rank;
  const Extent whole = share_of(c, from);
  if (bytes == whole.count * shape_.element) return one_less(c);
  // A piece, to be passed on; it was received where the share begins.
  const Extent mine = piece_of(c, from, me);
  std::byte* const base = out_ + whole.begin * shape_.element;
  std::byte* const place = out_ + mine.begin * shape_.element;
  if (place != base) {
    std::byte* const aside = messages_.scratch(bytes);
    messages_.copy(aside, base, bytes);
    messages_.copy(place, aside, bytes);
  }
  for (uint32_t i = 1; i < shape_.ranks; ++i) {
    const uint32_t rank = (me + i) % shape_.ranks;
    if (rank == from) continue;
    const Extent its = piece_of(c, from, rank);
    expect(rank, piece, c, out_ + its.begin * shape_.element, its.count * shape_.element, from);
    ++chunk.missing;
    messages_.send(rank, tag(piece, c, from), place, bytes);
  }
  one_less(c);
}

void NodeAllreduce::one_less(uint32_t c) {
  if (--chunks_[c].missing > 0) return;
  ++finished_chunks_;
  finished_(c);
  if (opened_ < shape_.chunks) open(opened_++);
}

void NodeAllreduce::received(uint64_t cookie, uint64_t bytes) {
  --expected_;
  const auto kind = static_cast<Kind>(cookie % 6);
  cookie /= 6;
  const auto from = static_cast<uint32_t>(cookie % shape_.ranks);
  const auto c = static_cast<uint32_t>(cookie / shape_.ranks / shape_.ranks);
  Chunk& chunk = chunks_[c];
  switch (kind) {
    case announcement:
      return arrived(from);
    case contribution:
      if (late_[shape_.rank]) return;  // the shares of this rank went to others
      if (bytes == 0 && share_of(c, shape_.rank).count > 0)
        return;  // the sender had noticed that first
      add(chunk.own, chunk.contributions[from], share_of(c, shape_.rank).count, from);
      return own_complete(c);
    case extra:
      add(chunk.extra, chunk.extras[from], extra_count(c, place_[shape_.rank]), from);
      return extra_complete(c);
    case share:
      return share_came(c, from, bytes);
    case extra_share:
      scatter_extra(c, place_[from], chunk.extra_shares[from]);
      return one_less(c);
    case piece:
      return one_less(c);
  }
}

}  // namespace nostall::collective
