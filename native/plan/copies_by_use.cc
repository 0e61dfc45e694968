// Divides a room into places, and follows Belady's rule in them. A heap a class has each copy's next use;
// an entry that is not its copy's next use any more is dropped when it comes to the top, or all of them
// when they are more than the others.
#include "plan/copies_by_use.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/error.h"

namespace nostall::plan {
namespace {

constexpr size_t kStale = 64;  // entries of a heap that cost less than to drop them

// Rises with the size; eight in every power of two.
uint32_t class_number(uint64_t size) {
  const auto bits = static_cast<uint32_t>(std::bit_width(size));
  if (bits <= 4) return static_cast<uint32_t>(size);
  const uint32_t shift = bits - 4;
  return shift * 8 + static_cast<uint32_t>(size >> shift);
}

}  // namespace

CopyPlaces::CopyPlaces(std::span<const uint64_t> sizes, const std::function<bool(SampleId)>& copied,
                       uint64_t room) {
  std::vector<Class> found(class_number(~uint64_t{0}) + 1);
  for (size_t s = 0; s < sizes.size(); ++s) {
    if (sizes[s] == 0 || !copied(s)) continue;
    Class& of = found[class_number(sizes[s])];
    of.number = class_number(sizes[s]);
    of.bytes = std::max(of.bytes, sizes[s]);
    ++of.count;
  }
  std::erase_if(found, [](const Class& c) { return c.count == 0; });
  double wanted = 0.0;
  for (const Class& c : found) wanted += static_cast<double>(c.bytes) * c.count;
  const double part = wanted > 0.0 ? std::min(1.0, static_cast<double>(room) / wanted) : 0.0;
  std::vector<std::pair<double, size_t>> rest;  // what each class is short of its part, in places
  uint64_t left = room;
  for (size_t c = 0; c < found.size(); ++c) {
    const double places = part * found[c].count;
    const double whole =
        std::min(std::floor(places),
                 std::floor(static_cast<double>(left) / static_cast<double>(found[c].bytes)));
    if (whole < found[c].count) rest.emplace_back(places - whole, c);
    found[c].count = static_cast<uint32_t>(whole);
    left -= found[c].count * found[c].bytes;
  }
  std::ranges::stable_sort(rest, std::ranges::greater(), [](const auto& r) { return r.first; });
  for (const auto& [lacks, c] : rest) {
    if (found[c].bytes > left) continue;
    ++found[c].count;
    left -= found[c].bytes;
  }
  std::erase_if(found, [](const Class& c) { return c.count == 0; });
  uint64_t begin = 0;
  uint32_t first = 0;
  for (Class& c : found) {
    c.first = first;
    c.begin = begin;
    first += c.count;
    begin += c.count * c.bytes;
  }
  classes_ = std::move(found);
}

uint64_t CopyPlaces::bytes() const noexcept {
  return classes_.empty() ? 0
                          : classes_.back().begin + classes_.back().count * classes_.back().bytes;
}

std::optional<size_t> CopyPlaces::class_of(uint64_t size) const noexcept {
  const uint32_t number = class_number(size);
  const auto at = std::ranges::lower_bound(classes_, number, {}, &Class::number);
  if (at == classes_.end() || at->number != number || size > at->bytes) return std::nullopt;
  return static_cast<size_t>(at - classes_.begin());
}

const CopyPlaces::Class& CopyPlaces::class_at(uint32_t place) const noexcept {
  return *std::prev(std::ranges::upper_bound(classes_, place, {}, &Class::first));
}

uint64_t CopyPlaces::begin_of(uint32_t place) const noexcept {
  const Class& of = class_at(place);
  return of.begin + (place - of.first) * of.bytes;
}

CopiesByUse::CopiesByUse(std::span<const uint64_t> sizes, CopyPlaces places)
    : sizes_(sizes),
      places_(std::move(places)),
      last_known_(sizes.size(), kNotKnown),
      place_of_(sizes.size(), kNoPlace),
      sample_in_(places_.count(), kNoPlace),
      next_use_(places_.count(), kNotKnown),
      used_(places_.classes().size(), 0),
      farthest_(places_.classes().size()) {}

void CopiesByUse::know(std::span<const uint32_t> samples, bool last) {
  accesses_.erase(accesses_.begin(), accesses_.begin() + static_cast<ptrdiff_t>(decided_ - begin_));
  begin_ = decided_;
  accesses_.reserve(accesses_.size() + samples.size());
  for (const uint32_t sample : samples) {
    const uint64_t number = begin_ + accesses_.size();
    const uint64_t before = std::exchange(last_known_[sample], number);
    if (before != kNotKnown && before >= begin_) {
      accesses_[before - begin_].next = number;
    } else if (place_of_[sample] != kNoPlace) {
      set_next(*places_.class_of(sizes_[sample]), place_of_[sample], number);
    }
    accesses_.push_back({sample, kNotKnown});
  }
  complete_ = last;
}

CopyUse CopiesByUse::next() {
  if (decided_ - begin_ >= accesses_.size()) {
    throw Error(ErrorKind::bug, "the copies of an access are asked for before it is known");
  }
  const auto [sample, next] = accesses_[decided_++ - begin_];
  const std::optional<size_t> of_class = places_.class_of(sizes_[sample]);
  if (!of_class) return {};
  const bool again = next != kNotKnown || !complete_;
  if (const uint32_t place = place_of_[sample]; place != kNoPlace) {
    set_next(*of_class, place, next);
    return {place, true, again};
  }
  const uint32_t place = again ? place_for(*of_class, next) : kNoPlace;
  if (place == kNoPlace) return {};
  if (sample_in_[place] != kNoPlace) place_of_[sample_in_[place]] = kNoPlace;
  sample_in_[place] = sample;
  place_of_[sample] = place;
  set_next(*of_class, place, next);
  return {place, false, true};
}

void CopiesByUse::set_next(size_t of_class, uint32_t place, uint64_t next) {
  next_use_[place] = next;
  Farthest& heap = farthest_[of_class];
  const uint32_t first = places_.classes()[of_class].first, used = used_[of_class];
  if (heap.size() < 2 * size_t{used} + kStale) {
    heap.emplace_back(next, place);
    std::ranges::push_heap(heap);
    return;
  }
  heap.clear();
  for (uint32_t p = first; p < first + used; ++p) heap.emplace_back(next_use_[p], p);
  std::ranges::make_heap(heap);
}

uint32_t CopiesByUse::place_for(size_t of_class, uint64_t next) {
  const CopyPlaces::Class& c = places_.classes()[of_class];
  if (used_[of_class] < c.count) return c.first + used_[of_class]++;
  Farthest& heap = farthest_[of_class];
  while (heap.front().first != next_use_[heap.front().second]) {
    std::ranges::pop_heap(heap);
    heap.pop_back();
  }
  return heap.front().first > next ? heap.front().second : kNoPlace;
}

}  // namespace nostall::plan
