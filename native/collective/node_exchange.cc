#include "collective/node_exchange.h"

#include <algorithm>
#include <utility>

namespace nostall::collective {

Extent part_of(uint64_t count, uint32_t part, uint32_t parts) noexcept {
  const uint64_t each = count / parts, more = count % parts;
  return {part * each + std::min<uint64_t>(part, more), each + (part < more ? 1 : 0)};
}

std::vector<bool> late_parties(const std::vector<std::vector<bool>>& seen, uint32_t late) {
  std::vector<bool> found(seen.size(), false);
  uint32_t many = 0;
  for (size_t party = 0; party < seen.size(); ++party) {
    uint32_t by = 0;
    for (size_t other = 0; other < seen.size(); ++other) {
      by += other != party && seen[other][party] ? 1 : 0;
    }
    found[party] = by < late;
    many += by < late ? 1 : 0;
  }
  if (many > 2 * late || many == seen.size()) std::fill(found.begin(), found.end(), false);
  return found;
}

NodeExchange::NodeExchange(const ExchangeShape& shape, Peers& peers, const std::byte* in,
                           std::byte* out, std::function<void(uint32_t)> finished)
    : shape_(shape),
      peers_(peers),
      in_(in),
      out_(out),
      finished_(std::move(finished)),
      seen_(shape.ranks, std::vector<bool>(shape.ranks, false)),
      rows_(size_t{shape.ranks} * shape.ranks),
      present_(shape.ranks, false),
      sendable_(shape.ranks, false),
      late_(shape.ranks, false),
      place_(shape.ranks, 0),
      chunks_(shape.chunks) {}

Extent NodeExchange::share_of(uint32_t chunk, uint32_t party) const noexcept {
  const Extent all = this->chunk(chunk);
  const Extent part = part_of(all.count, party, shape_.ranks);
  return {all.begin + part.begin, part.count};
}

Extent NodeExchange::extra_of(uint32_t chunk, uint32_t late_party, uint32_t place) const noexcept {
  const Extent all = share_of(chunk, late_party);
  const Extent part = part_of(all.count, place, static_cast<uint32_t>(owners_.size()));
  return {all.begin + part.begin, part.count};
}

Extent NodeExchange::piece_of(uint32_t chunk, uint32_t owner, uint32_t party) const noexcept {
  const Extent all = share_of(chunk, owner);
  const uint32_t place = party < owner ? party : party - 1;
  const Extent part = part_of(all.count, place, shape_.ranks - 1);
  return {all.begin + part.begin, part.count};
}

uint64_t NodeExchange::extra_count(uint32_t chunk, uint32_t place) const noexcept {
  uint64_t count = 0;
  for (uint32_t party = 0; party < shape_.ranks; ++party) {
    if (late_[party]) count += extra_of(chunk, party, place).count;
  }
  return count;
}

void NodeExchange::gather_extra(uint32_t chunk, uint32_t place, std::byte* into) {
  for (uint32_t party = 0; party < shape_.ranks; ++party) {
    if (!late_[party]) continue;
    const Extent part = extra_of(chunk, party, place);
    peers_.copy(into, in_ + part.begin * shape_.element, part.count * shape_.element);
    into += part.count * shape_.element;
  }
}

void NodeExchange::scatter_extra(uint32_t chunk, uint32_t place, const std::byte* from) {
  for (uint32_t party = 0; party < shape_.ranks; ++party) {
    if (!late_[party]) continue;
    const Extent part = extra_of(chunk, party, place);
    peers_.copy(out_ + part.begin * shape_.element, from, part.count * shape_.element);
    from += part.count * shape_.element;
  }
}

void NodeExchange::listen() {
  for (uint32_t party = 0; party < shape_.ranks; ++party) {
    if (party == shape_.rank) continue;
    expect(party, announcement, 0, &rows_[size_t{party} * shape_.ranks], shape_.ranks);
  }
}

void NodeExchange::announce() {
  const uint32_t me = shape_.rank;
  for (uint32_t party = 0; party < shape_.ranks; ++party) {
    rows_[size_t{me} * shape_.ranks + party] = present_[party] ? 1 : 0;
  }
  for (uint32_t i = 1; i < shape_.ranks; ++i) {
    const uint32_t party = (me + i) % shape_.ranks;
    peers_.send(party, tag(announcement, 0), &rows_[size_t{me} * shape_.ranks], shape_.ranks);
  }
  while (opened_ < std::min(shape_.window, shape_.chunks)) open(opened_++);
  arrived(me);
}

void NodeExchange::open(uint32_t c) {
  Chunk& chunk = chunks_[c];
  const uint32_t me = shape_.rank;
  const Extent own = share_of(c, me);
  chunk.open = true;
  chunk.sent.assign(shape_.ranks, false);
  chunk.contributions.assign(shape_.ranks, nullptr);
  chunk.own.into = out_ + own.begin * shape_.element;
  chunk.missing = 1;  // the decision
  for (uint32_t i = 1; i < shape_.ranks; ++i) {
    const uint32_t party = (me + shape_.ranks - i) % shape_.ranks;
    chunk.contributions[party] = peers_.scratch(own.count * shape_.element);
    expect(party, contribution, c, chunk.contributions[party], own.count * shape_.element);
  }
  if (decided_) expect_results(c);
  if (chunk.ready) brought(c);
  if (decided_) one_less(c);
}

// All others may send to `party` at once unless it may turn out to be among the last.
void NodeExchange::arrived(uint32_t party) {
  present_[party] = true;
  ++present_count_;
  for (uint32_t other = 0; other < shape_.ranks; ++other) {
    seen_[party][other] = rows_[size_t{party} * shape_.ranks + other] != 0;
  }
  if (shape_.ranks - present_count_ >= shape_.late) sendable_[party] = true;
  for (uint32_t c = 0; c < shape_.chunks; ++c) contribute(c, party);
  if (present_count_ == shape_.ranks) decide();
}

void NodeExchange::decide() {
  late_ = late_parties(seen_, shape_.late);
  decided_ = true;
  for (uint32_t party = 0; party < shape_.ranks; ++party) {
    place_[party] = static_cast<uint32_t>(owners_.size());
    if (!late_[party]) owners_.push_back(party);
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

void NodeExchange::expect_results(uint32_t c) {
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
    chunk.extra_shares[owner] = peers_.scratch(bytes);
    expect(owner, extra_share, c, chunk.extra_shares[owner], bytes);
    ++chunk.missing;
  }
  if (late_[me]) return;
  ++chunk.missing;  // my share
  if (!extras) return;
  ++chunk.missing;
  const uint64_t bytes = extra_count(c, place_[me]) * shape_.element;
  chunk.extra.into = peers_.scratch(bytes);
  chunk.extras.assign(shape_.ranks, nullptr);
  for (uint32_t party = 0; party < shape_.ranks; ++party) {
    if (party == me) continue;
    chunk.extras[party] = peers_.scratch(bytes);
    expect(party, extra, c, chunk.extras[party], bytes);
  }
}

void NodeExchange::contribute(uint32_t c, uint32_t party) {
  Chunk& chunk = chunks_[c];
  if (party == shape_.rank || !chunk.open || !chunk.ready || chunk.sent[party]) return;
  if (!present_[party]) return;
  if (!decided_ && !sendable_[party]) return;
  const Extent part = share_of(c, party);
  chunk.sent[party] = true;
  peers_.send(party, tag(contribution, c), in_ + part.begin * shape_.element,
              late_[party] ? 0 : part.count * shape_.element);
}

void NodeExchange::contribute_extra(uint32_t c) {
  if (owners_.size() == shape_.ranks) return;
  Chunk& chunk = chunks_[c];
  for (uint32_t i = 1; i <= shape_.ranks; ++i) {
    const uint32_t party = (shape_.rank + i) % shape_.ranks;
    if (late_[party]) continue;
    const uint64_t count = extra_count(c, place_[party]);
    std::byte* packed = peers_.scratch(count * shape_.element);
    gather_extra(c, place_[party], packed);
    if (party == shape_.rank) {
      add(chunk.extra, packed, count, party);
      extra_complete(c);
    } else {
      peers_.send(party, tag(extra, c), packed, count * shape_.element);
    }
  }
}

void NodeExchange::add(Sum& sum, const std::byte* from, uint64_t count, uint32_t party) {
  if (!shape_.in_order) {
    peers_.fold(sum.into, from, count, sum.added == 0);
    ++sum.added;
    return;
  }
  sum.waiting.resize(shape_.ranks, nullptr);
  sum.came.resize(shape_.ranks, false);
  sum.waiting[party] = from;
  sum.came[party] = true;
  while (sum.next < shape_.ranks && sum.came[sum.next]) {
    peers_.fold(sum.into, sum.waiting[sum.next++], count, sum.added == 0);
    ++sum.added;
  }
}

void NodeExchange::ready(uint32_t c) {
  chunks_[c].ready = true;
  if (chunks_[c].open) brought(c);
}

void NodeExchange::brought(uint32_t c) {
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
void NodeExchange::own_complete(uint32_t c) {
  Chunk& chunk = chunks_[c];
  const uint32_t me = shape_.rank;
  if (!decided_ || late_[me] || chunk.own.added != shape_.ranks) return;
  const Extent whole = share_of(c, me);
  const bool in_pieces = chunk.mine_last && whole.count >= shape_.ranks;
  for (uint32_t i = 1; i < shape_.ranks; ++i) {
    const uint32_t party = (me + i) % shape_.ranks;
    const Extent part = in_pieces ? piece_of(c, me, party) : whole;
    peers_.send(party, tag(share, c), out_ + part.begin * shape_.element,
                part.count * shape_.element);
  }
  chunk.own.added = shape_.ranks + 1;
  one_less(c);
}

void NodeExchange::extra_complete(uint32_t c) {
  Chunk& chunk = chunks_[c];
  if (chunk.extra.added != shape_.ranks) return;
  const uint32_t me = shape_.rank;
  const uint64_t bytes = extra_count(c, place_[me]) * shape_.element;
  for (uint32_t i = 1; i < shape_.ranks; ++i) {
    peers_.send((me + i) % shape_.ranks, tag(extra_share, c), chunk.extra.into, bytes);
  }
  scatter_extra(c, place_[me], chunk.extra.into);
  one_less(c);
}

void NodeExchange::share_came(uint32_t c, uint32_t from, uint64_t bytes) {
  Chunk& chunk = chunks_[c];
  const uint32_t me = shape_.rank;
  const Extent whole = share_of(c, from);
  if (bytes == whole.count * shape_.element) return one_less(c);
  // A piece, to be passed on; it came to where the share begins.
  const Extent mine = piece_of(c, from, me);
  std::byte* const base = out_ + whole.begin * shape_.element;
  std::byte* const place = out_ + mine.begin * shape_.element;
  if (place != base) {
    std::byte* const aside = peers_.scratch(bytes);
    peers_.copy(aside, base, bytes);
    peers_.copy(place, aside, bytes);
  }
  for (uint32_t i = 1; i < shape_.ranks; ++i) {
    const uint32_t party = (me + i) % shape_.ranks;
    if (party == from) continue;
    const Extent its = piece_of(c, from, party);
    expect(party, piece, c, out_ + its.begin * shape_.element, its.count * shape_.element, from);
    ++chunk.missing;
    peers_.send(party, tag(piece, c, from), place, bytes);
  }
  one_less(c);
}

void NodeExchange::one_less(uint32_t c) {
  if (--chunks_[c].missing > 0) return;
  ++finished_chunks_;
  finished_(c);
  if (opened_ < shape_.chunks) open(opened_++);
}

void NodeExchange::received(uint64_t cookie, uint64_t bytes) {
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
      if (late_[shape_.rank]) return;  // my share went to others
      if (bytes == 0 && share_of(c, shape_.rank).count > 0)
        return;  // the sender knows that before me
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
