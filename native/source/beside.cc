// Records laid side by side, each read by the reader of its source.
#include "source/beside.h"

#include <algorithm>
#include <utility>

#include "base/fnv.h"

namespace nostall::source {
namespace {

[[noreturn]] void usage(const std::string& what) { throw Error(ErrorKind::usage, what); }

}  // namespace

class BesideSource::AllReader : public Reader {
 public:
  AllReader(const BesideSource& source, ReaderKind kind, unsigned depth) : source_(source) {
    for (const auto& part : source.sources_) readers_.push_back(part->make_reader(kind, depth));
  }

  void read(std::span<ReadRequest> requests) override {
    filled_.assign(requests.size(), 0);
    for (ReadRequest& request : requests) {
      request.error = 0;
      request.why.clear();
    }
    for (size_t s = 0; s < readers_.size(); ++s) {
      const Source& source = *source_.sources_[s];
      asked_.clear();
      for (size_t r = 0; r < requests.size(); ++r) {
        const ReadRequest& request = requests[r];
        const auto size = static_cast<size_t>(source.sizes()[request.sample]);
        asked_.push_back({request.sample, request.into.subspan(filled_[r], size), 0, request.once});
        filled_[r] += size;
      }
      readers_[s]->read(asked_);
      for (size_t r = 0; r < requests.size(); ++r) {
        if (asked_[r].error == 0 || requests[r].error != 0) continue;
        requests[r].error = asked_[r].error;
        requests[r].why = source.describe(asked_[r].sample) + ": " + read_error_text(asked_[r]);
      }
    }
  }
  std::string_view name() const override { return readers_.front()->name(); }

 private:
  const BesideSource& source_;
  std::vector<std::unique_ptr<Reader>> readers_;
  std::vector<ReadRequest> asked_;
  std::vector<size_t> filled_;
};

BesideSource::BesideSource(std::vector<std::shared_ptr<const Source>> sources,
                           std::vector<Field> fields)
    : sources_(std::move(sources)), fields_(std::move(fields)) {
  if (sources_.empty() || fields_.empty()) usage("sources side by side need a source and a field");
  Fnv hash;
  sizes_.assign(sources_.front()->size(), 0);
  for (const auto& source : sources_) {
    if (source->size() != size()) {
      usage("sources side by side have as many samples, not " + std::to_string(size()) + " and " +
            std::to_string(source->size()));
    }
    const auto sizes = source->sizes();
    for (uint64_t i = 0; i < size(); ++i) sizes_[i] += sizes[i];
    total_ += source->total_bytes();
    hash.number(source->fingerprint());
  }
  for (const Field& field : fields_) {
    if (field.first > field.last || field.last >= sources_.size()) {
      usage("a field of sources that are not side by side");
    }
    hash.number(field.first).number(field.last);
  }
  fingerprint_ = hash.value();
}

// As of a view.
uint64_t BesideSource::stamp() const {
  if (stamp_covers_samples()) return files_stamp();
  Fnv hash;
  for (const auto& source : sources_) hash.number(source->stamp());
  return hash.value();
}

uint64_t BesideSource::files_stamp() const {
  Fnv hash;
  for (const auto& source : sources_) hash.number(source->files_stamp());
  return hash.value();
}

bool BesideSource::stamp_covers_samples() const {
  return std::any_of(sources_.begin(), sources_.end(),
                     [](const auto& source) { return source->stamp_covers_samples(); });
}

bool BesideSource::stamp_tells_content() const {
  for (const auto& source : sources_) {
    if (!source->stamp_tells_content()) return false;
  }
  return true;
}

std::unique_ptr<Reader> BesideSource::make_reader(ReaderKind kind, unsigned depth) const {
  return std::make_unique<AllReader>(*this, kind, depth);
}

Result<std::monostate> BesideSource::locate(uint64_t sample, std::span<const std::byte> record,
                                            std::span<FieldBytes> out) const {
  if (out.size() != fields_.size()) {
    return Error(ErrorKind::bug, "locate() is given another number of fields");
  }
  if (record.size() != sizes_[sample]) {
    return Error(ErrorKind::corruption, "its record has " + std::to_string(record.size()) +
                                            " bytes instead of " + std::to_string(sizes_[sample]));
  }
  for (size_t f = 0; f < fields_.size(); ++f) {
    uint64_t begin = 0, bytes = 0;
    for (uint32_t s = 0; s <= fields_[f].last; ++s) {
      (s < fields_[f].first ? begin : bytes) += sources_[s]->sizes()[sample];
    }
    out[f] = {record.subspan(begin, bytes), true};
  }
  return std::monostate{};
}

}  // namespace nostall::source
