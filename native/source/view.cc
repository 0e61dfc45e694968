// Views: the map from a sample to its part, and readers that share requests out among the parts.
#include "source/view.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/fnv.h"

namespace nostall::source {
namespace {

class ViewReader : public Reader {
 public:
  ViewReader(const ViewSource& source, ReaderKind kind, unsigned depth)
      : source_(source),
        kind_(kind),
        depth_(depth),
        readers_(source.parts().size()),
        shares_(source.parts().size()),
        places_(source.parts().size()) {}

  void read(std::span<ReadRequest> requests) override {
    for (const size_t part : asked_) {  // left behind by a reader that threw
      shares_[part].clear();
      places_[part].clear();
    }
    asked_.clear();
    for (size_t i = 0; i < requests.size(); ++i) {
      const auto [part, sample] = source_.origin(requests[i].sample);
      if (shares_[part].empty()) asked_.push_back(part);
      shares_[part].push_back(requests[i]);
      shares_[part].back().sample = sample;
      places_[part].push_back(i);
    }
    for (const size_t part : asked_) {
      std::vector<ReadRequest>& share = shares_[part];
      reader_of(part).read(share);
      for (size_t k = 0; k < share.size(); ++k) {
        requests[places_[part][k]].error = share[k].error;
        requests[places_[part][k]].why = std::move(share[k].why);
      }
    }
  }
  std::string_view name() const override { return "view"; }

 private:
  Reader& reader_of(size_t part) {
    if (!readers_[part]) {
      readers_[part] = source_.parts()[part].source->make_reader(kind_, depth_);
    }
    return *readers_[part];
  }

  const ViewSource& source_;
  const ReaderKind kind_;
  const unsigned depth_;
  std::vector<std::unique_ptr<Reader>> readers_;  // made when a part is first read
  std::vector<std::vector<ReadRequest>> shares_;
  std::vector<std::vector<size_t>> places_;
  std::vector<size_t> asked_;
};

}  // namespace

void ViewSource::Numbers::take(std::span<const uint64_t> numbers, bool wide) {
  if (wide) {
    wide_.assign(numbers.begin(), numbers.end());
    return;
  }
  narrow_.resize(numbers.size());
  std::transform(numbers.begin(), numbers.end(), narrow_.begin(),
                 [](uint64_t number) { return static_cast<uint32_t>(number); });
}

ViewSource::ViewSource(std::vector<Part> parts, std::optional<std::span<const uint64_t>> numbers)
    : parts_(std::move(parts)) {
  if (parts_.empty()) throw Error(ErrorKind::usage, "a view needs at least one part");
  for (const Part& part : parts_) {
    if (part.source->fields() != fields()) {
      throw Error(ErrorKind::usage, "samples of " + std::to_string(fields()) + " and of " +
                                        std::to_string(part.source->fields()) +
                                        " fields do not go into one view");
    }
  }
  begins_.push_back(0);
  for (const Part& part : parts_) begins_.push_back(begins_.back() + part.source->size());
  const uint64_t all = begins_.back();
  bool chosen = numbers && numbers->size() != all;
  if (numbers) {
    for (uint64_t i = 0; i < numbers->size(); ++i) {
      const uint64_t number = (*numbers)[i];
      if (number >= all) {
        throw Error(ErrorKind::usage, "a view names sample " + std::to_string(number) +
                                          ", but there are only " + std::to_string(all));
      }
      chosen = chosen || number != i;
    }
  }
  if (chosen) {
    const bool wide = all > std::numeric_limits<uint32_t>::max();
    numbers_.take(*numbers, wide);
    if (!std::is_sorted(numbers->begin(), numbers->end())) {
      std::vector<uint64_t> samples(numbers->size());
      std::iota(samples.begin(), samples.end(), uint64_t{0});
      std::stable_sort(samples.begin(), samples.end(),
                       [&](uint64_t a, uint64_t b) { return (*numbers)[a] < (*numbers)[b]; });
      by_number_.take(samples, wide);
    }
  }
  const uint64_t count = chosen ? numbers->size() : all;
  if (count == 0) throw Error(ErrorKind::usage, "a view needs at least one sample");
  sizes_.reserve(count);
  labels_.reserve(count);
  Fnv hash;
  hash.text("view").number(parts_.size());
  for (const Part& part : parts_) {
    hash.number(part.source->fingerprint()).number(static_cast<uint64_t>(part.label_offset));
  }
  hash.number(count);
  size_t part = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t number = chosen ? (*numbers)[i] : i;
    if (number < begins_[part] || number >= begins_[part + 1]) part = part_of(number);
    const Source& source = *parts_[part].source;
    const uint64_t sample = number - begins_[part];
    sizes_.push_back(source.sizes()[sample]);
    labels_.push_back(source.labels()[sample] + parts_[part].label_offset);
    total_bytes_ += sizes_.back();
    hash.number(number);
  }
  fingerprint_ = hash.value();
}

size_t ViewSource::part_of(uint64_t number) const noexcept {
  if (parts_.size() == 1) return 0;
  const auto next = std::upper_bound(begins_.begin(), begins_.end(), number);
  return static_cast<size_t>(next - begins_.begin()) - 1;
}

uint64_t ViewSource::number(uint64_t sample) const noexcept {
  return numbers_.empty() ? sample : numbers_[sample];
}

std::pair<size_t, uint64_t> ViewSource::origin(uint64_t sample) const noexcept {
  const uint64_t at = number(sample);
  const size_t part = part_of(at);
  return {part, at - begins_[part]};
}

std::optional<uint64_t> ViewSource::find(uint64_t number) const noexcept {
  if (numbers_.empty()) return number;
  uint64_t low = 0, high = size();
  const auto sample_at = [&](uint64_t rank) {
    return by_number_.empty() ? rank : by_number_[rank];
  };
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (numbers_[sample_at(middle)] < number) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == size() || numbers_[sample_at(low)] != number) return std::nullopt;
  return sample_at(low);
}

// Where another stamp means that any sample may be another, directories of some parts do not count.
uint64_t ViewSource::stamp() const {
  if (stamp_covers_samples()) return files_stamp();
  Fnv hash;
  for (const Part& part : parts_) hash.number(part.source->stamp());
  return hash.value();
}

uint64_t ViewSource::files_stamp() const {
  Fnv hash;
  for (const Part& part : parts_) hash.number(part.source->files_stamp());
  return hash.value();
}

bool ViewSource::stamp_covers_samples() const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return part.source->stamp_covers_samples(); });
}

bool ViewSource::stamp_tells_content() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return part.source->stamp_tells_content(); });
}

bool ViewSource::is_local() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return part.source->is_local(); });
}

std::string ViewSource::describe(uint64_t sample) const {
  const auto [part, there] = origin(sample);
  return parts_[part].source->describe(there);
}

const std::string& ViewSource::sums_file_of(uint64_t sample) const {
  const auto [part, there] = origin(sample);
  return parts_[part].source->sums_file_of(there);
}

std::unique_ptr<Reader> ViewSource::make_reader(ReaderKind kind, unsigned depth) const {
  return std::make_unique<ViewReader>(*this, kind, depth);
}

Result<std::monostate> ViewSource::locate(uint64_t sample, std::span<const std::byte> record,
                                          std::span<FieldBytes> out) const {
  const auto [part, there] = origin(sample);
  // Other labels than the part's: they are the view's own.
  if (parts_[part].label_offset != 0) return Source::locate(sample, record, out);
  return parts_[part].source->locate(there, record, out);
}

uint64_t ViewSource::batch_bytes() const {
  uint64_t most = 0;
  for (const Part& part : parts_) most = std::max(most, part.source->batch_bytes());
  return most;
}

uint32_t ViewSource::made_at_once() const {
  uint32_t most = 0;
  for (const Part& part : parts_) most = std::max(most, part.source->made_at_once());
  return most;
}

void ViewSource::around(uint64_t sample, std::vector<uint64_t>& out) const {
  const auto [part, there] = origin(sample);
  const size_t before = out.size();
  parts_[part].source->around(there, out);
  size_t kept = before;
  for (size_t i = before; i < out.size(); ++i) {
    const std::optional<uint64_t> here = find(begins_[part] + out[i]);
    if (here && *here != sample) out[kept++] = *here;
  }
  out.resize(kept);
}

SampleSums ViewSource::make_sums() const {
  sums_of_parts_.clear();
  for (const Part& part : parts_) sums_of_parts_.push_back(&part.source->sums());
  const auto find = [](const void* owner, uint64_t sample) noexcept -> std::atomic<uint32_t>& {
    const auto& view = *static_cast<const ViewSource*>(owner);
    const auto [part, there] = view.origin(sample);
    return view.sums_of_parts_[part]->word(there);
  };
  return {find, this, size()};
}

}  // namespace nostall::source
