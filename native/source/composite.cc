// Records made of parts, and where their fields lie again.
#include "source/composite.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/fnv.h"

namespace nostall::source {
namespace {

[[noreturn]] void usage(const std::string& what) { throw Error(ErrorKind::usage, what); }

void check(const Column& column, const std::string& name, uint64_t samples) {
  bool good = column.present.empty() || column.present.size() == samples;
  if (column.width != 0) {
    uint64_t bytes = 0;
    good = good && column.ends.empty() && !__builtin_mul_overflow(column.width, samples, &bytes) &&
           column.values.size() == bytes;
  } else {
    good = good && column.ends.size() == samples + 1 && column.ends.front() == 0 &&
           column.ends.back() == column.values.size() &&
           std::is_sorted(column.ends.begin(), column.ends.end());
  }
  if (!good) usage("column " + name + " does not have one value for each sample");
}

void hash_bytes(Fnv& hash, std::span<const std::byte> bytes) {
  hash.word(bytes.size());
  for (size_t i = 0; i < bytes.size(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min(sizeof word, bytes.size() - i));
    hash.word(word);
  }
}

}  // namespace

// Reads the parts of all requests at once, each into its place in the record.
class CompositeSource::PartsReader : public Reader {
 public:
  PartsReader(const CompositeSource& source, std::unique_ptr<Reader> reader)
      : source_(source), reader_(std::move(reader)) {}

  void read(std::span<ReadRequest> requests) override {
    asked_.clear();
    of_.clear();
    for (size_t r = 0; r < requests.size(); ++r) {
      ReadRequest& request = requests[r];
      request.error = 0;
      size_t at = 0;
      for (size_t f = 0; f < source_.chosen_parts_; ++f) {
        const uint32_t part = source_.part(request.sample, source_.chosen_[f]);
        if (part == kNoPart) continue;
        const auto size = static_cast<size_t>(source_.table_->source->sizes()[part]);
        asked_.push_back({part, request.into.subspan(at, size), 0, request.once});
        of_.push_back(r);
        at += size;
      }
    }
    if (reader_) reader_->read(asked_);
    for (size_t i = 0; i < asked_.size(); ++i) {
      ReadRequest& request = requests[of_[i]];
      if (asked_[i].error == 0 || request.error != 0) continue;
      request.error = asked_[i].error;
      request.why =
          source_.table_->source->describe(asked_[i].sample) + ": " + read_error_text(asked_[i]);
    }
  }
  std::string_view name() const override { return reader_ ? reader_->name() : "memory"; }

 private:
  const CompositeSource& source_;
  std::unique_ptr<Reader> reader_;  // null if there are no parts
  std::vector<ReadRequest> asked_;
  std::vector<size_t> of_;  // the request that each part belongs to
};

CompositeSource::CompositeSource(Table table)
    : CompositeSource(
          [&table]() -> std::shared_ptr<const Table> {
            const uint64_t n = table.samples;
            if (table.columns.size() > table.names.size()) usage("a column has no name");
            const size_t parts = table.names.size() - table.columns.size();
            if (table.parts.size() != n * parts) usage("there must be a part a sample and field");
            const uint64_t most = table.source ? table.source->size() : 0;
            for (const uint32_t part : table.parts) {
              if (part != kNoPart && part >= most) usage("a part that its source does not have");
            }
            for (size_t c = 0; c < table.columns.size(); ++c) {
              check(table.columns[c], table.names[parts + c], n);
            }
            if (table.labels.empty()) table.labels.assign(n, 0);
            if (table.labels.size() != n) usage("there must be a label a sample");
            return std::make_shared<const Table>(std::move(table));
          }(),
          {}) {}

CompositeSource::CompositeSource(std::shared_ptr<const Table> table, std::vector<uint32_t> chosen)
    : table_(std::move(table)), chosen_(std::move(chosen)) {
  if (chosen_.empty()) {
    chosen_.resize(table_->names.size());
    std::iota(chosen_.begin(), chosen_.end(), 0u);
  }
  chosen_parts_ = static_cast<size_t>(std::lower_bound(chosen_.begin(), chosen_.end(), parts()) -
                                      chosen_.begin());
  if (chosen_parts_ > 0) sample_of_.assign(table_->source->size(), kNoPart);
  sizes_.reserve(size());
  Fnv hash;
  for (const uint32_t field : chosen_) hash.text(table_->names[field]);
  for (const int64_t label : table_->labels) hash.word(static_cast<uint64_t>(label));
  for (uint64_t s = 0; s < size(); ++s) {
    uint64_t bytes = 0;
    for (size_t f = 0; f < chosen_parts_; ++f) {
      const uint32_t part = this->part(s, chosen_[f]);
      hash.word(part);
      if (part == kNoPart) continue;
      bytes += table_->source->sizes()[part];
      sample_of_[part] = static_cast<uint32_t>(s);
    }
    sizes_.push_back(bytes);
    total_ += bytes;
  }
  if (chosen_parts_ > 0) hash.word(table_->source->fingerprint());
  for (size_t f = chosen_parts_; f < chosen_.size(); ++f) {
    const Column& column = table_->columns[chosen_[f] - parts()];
    hash.word(column.width);
    hash_bytes(hash, column.values);
    hash_bytes(hash, std::as_bytes(std::span(column.ends)));
    hash_bytes(hash, std::as_bytes(std::span(column.present)));
  }
  fingerprint_ = hash.value();
}

std::shared_ptr<CompositeSource> CompositeSource::select(std::span<const uint32_t> fields) const {
  std::vector<uint32_t> chosen;
  for (const uint32_t field : fields) {
    if (field >= chosen_.size()) usage("a field that the source does not have");
    chosen.push_back(chosen_[field]);
  }
  if (chosen.empty() ||
      std::adjacent_find(chosen.begin(), chosen.end(), std::greater_equal<>()) != chosen.end()) {
    usage("fields are chosen in rising order");
  }
  return std::shared_ptr<CompositeSource>(new CompositeSource(table_, std::move(chosen)));
}

uint64_t CompositeSource::stamp() const { return table_->source ? table_->source->stamp() : 0; }

uint64_t CompositeSource::files_stamp() const {
  return table_->source ? table_->source->files_stamp() : 0;
}

bool CompositeSource::stamp_covers_samples() const {
  return table_->source && table_->source->stamp_covers_samples();
}

bool CompositeSource::stamp_tells_content() const {
  return table_->source && table_->source->stamp_tells_content();
}

std::string CompositeSource::describe(uint64_t sample) const {
  for (size_t f = 0; f < chosen_parts_; ++f) {
    const uint32_t part = this->part(sample, chosen_[f]);
    if (part != kNoPart) return table_->source->describe(part);
  }
  return "sample " + std::to_string(sample);
}

std::unique_ptr<Reader> CompositeSource::make_reader(ReaderKind kind, unsigned depth) const {
  return std::make_unique<PartsReader>(
      *this, chosen_parts_ > 0 ? table_->source->make_reader(kind, depth) : nullptr);
}

Result<std::monostate> CompositeSource::locate(uint64_t sample, std::span<const std::byte> record,
                                               std::span<FieldBytes> out) const {
  if (out.size() != chosen_.size()) {
    return Error(ErrorKind::bug, "locate() is given another number of fields");
  }
  if (record.size() != sizes_[sample]) {
    return Error(ErrorKind::corruption, "its record has " + std::to_string(record.size()) +
                                            " bytes instead of " + std::to_string(sizes_[sample]));
  }
  size_t at = 0;
  for (size_t f = 0; f < chosen_parts_; ++f) {
    const uint32_t part = this->part(sample, chosen_[f]);
    out[f] = {{}, part != kNoPart};
    if (part == kNoPart) continue;
    const auto size = static_cast<size_t>(table_->source->sizes()[part]);
    out[f].bytes = record.subspan(at, size);
    at += size;
  }
  for (size_t f = chosen_parts_; f < chosen_.size(); ++f) {
    const Column& column = table_->columns[chosen_[f] - parts()];
    const uint64_t begin = column.width != 0 ? sample * column.width : column.ends[sample];
    const uint64_t end = column.width != 0 ? begin + column.width : column.ends[sample + 1];
    out[f] = {std::span(column.values).subspan(begin, end - begin),
              column.present.empty() || column.present[sample] != 0};
  }
  return std::monostate{};
}

uint64_t CompositeSource::batch_bytes() const {
  return chosen_parts_ > 0 ? table_->source->batch_bytes() : 0;
}

void CompositeSource::around(uint64_t sample, std::vector<uint64_t>& out) const {
  if (sample_of_.empty()) return;
  std::vector<uint64_t> near;
  for (size_t f = 0; f < chosen_parts_; ++f) {
    const uint32_t part = this->part(sample, chosen_[f]);
    if (part != kNoPart) table_->source->around(part, near);
  }
  for (const uint64_t part : near) {
    const uint32_t other = sample_of_[part];
    if (other == kNoPart || other == sample) continue;
    if (out.empty() || out.back() != other) out.push_back(other);
  }
}

}  // namespace nostall::source
