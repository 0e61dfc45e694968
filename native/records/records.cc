// RecordSource and its reader. A call of the reader does the following:
// 1. Samples wanted become pieces; coalesce() makes them ranges, as the measured cost suggests.
// 2. Ranges are read in groups of bounded total size. A range of one sample is read straight to its
//    place; others go through a buffer and are copied out.
// 3. Pieces of a range that failed are read again one by one, since another sample's bytes may be
//    the bad ones.
// 4. Bytes before a sample are checked (CheckHead), and files are checked for changes afterwards.
#include "records/records.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

#include "base/clock.h"
#include "base/fnv.h"
#include "records/local.h"

namespace nostall::records {
namespace {

// Coalesced ranges start and end on such a boundary, as direct reads want it.
constexpr uint64_t kBoundary = 4096;
constexpr size_t kMaxHead = 4096;
// At most this many neighbours are considered, however small they are.
constexpr size_t kMostAround = 1024;
// Samples of a file that are read again when it was touched.
constexpr size_t kMostRemembered = 8;

// One thread's reader: plans the ranges of a call, reads them, deals the bytes out.
class RecordReader : public source::Reader {
 public:
  RecordReader(const RecordSource& source, source::ReaderKind kind, unsigned depth)
      : source_(source), ranges_(source.storage().make_reader(kind, depth)) {}

  void read(std::span<source::ReadRequest> requests) override {
    if (requests.empty()) return;
    // One call's bytes in flight are bounded, whatever is asked for.
    for (size_t begin = 0; begin < requests.size();) {
      uint64_t bytes = 0;
      size_t end = begin;
      while (end < requests.size() &&
             (end == begin || bytes + requests[end].into.size() <= kMaxCall)) {
        bytes += requests[end++].into.size();
      }
      read_some(requests.subspan(begin, end - begin));
      begin = end;
    }
  }
  std::string_view name() const override { return ranges_->name(); }

 private:
  static constexpr uint64_t kMaxCall = uint64_t{16} << 20;

  void read_some(std::span<source::ReadRequest> requests) {
    const KeptTable& table = source_.table();
    std::vector<Piece> pieces;
    pieces.reserve(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      const uint64_t sample = requests[i].sample;
      const uint64_t head = table.head_of(sample);
      requests[i].error = 0;
      requests[i].why.clear();
      pieces.push_back({table.file_of(sample), table.offset[sample] - head,
                        table.length[sample] + head, static_cast<uint32_t>(i)});
    }
    const CoalesceLimits limits =
        source_.options().coalesce ? source_.limits() : CoalesceLimits{0, 0};
    const std::vector<Together> together = coalesce(pieces, limits);
    // What lies between the samples needs room as well, and may be many times their size.
    for (size_t first = 0; first < together.size();) {
      uint64_t bytes = together[first].length;
      size_t end = first + 1;
      while (end < together.size() && bytes + together[end].length <= kMaxCall) {
        bytes += together[end++].length;
      }
      read_ranges(requests, pieces, std::span(together).subspan(first, end - first));
      first = end;
    }
    check_files(requests, together);
    for (const source::ReadRequest& r : requests) {
      if (r.error == 0) source_.remember(r.sample, r.into);
    }
  }

  void read_ranges(std::span<source::ReadRequest> requests, const std::vector<Piece>& pieces,
                   std::span<const Together> together) {
    plan(requests, pieces, together);
    const int64_t begin = now_ns();
    ranges_->read(reads_);
    uint64_t bytes = 0;
    for (const RangeRead& r : reads_) bytes += r.size();
    source_.cost().record(static_cast<double>(reads_.size()), static_cast<double>(bytes),
                          static_cast<double>(now_ns() - begin) * 1e-9);
    std::vector<Piece> again;
    for (size_t i = 0; i < together.size(); ++i) {
      deal_out(requests, pieces, together[i], reads_[i], again);
    }
    if (!again.empty()) read_alone(requests, again);
  }

  // A range of one sample goes straight to its place, others through a buffer of this reader.
  void plan(std::span<source::ReadRequest> requests, const std::vector<Piece>& pieces,
            std::span<const Together> together) {
    const KeptTable& table = source_.table();
    const auto files = source_.storage().files();
    uint64_t buffered = 0, heads = 0;
    const auto widened = [&](const Together& t) {
      const uint64_t begin = t.offset / kBoundary * kBoundary;
      const uint64_t end = std::min(files[t.file].size,
                                    (t.offset + t.length + kBoundary - 1) / kBoundary * kBoundary);
      return std::pair{begin, end};
    };
    for (const Together& t : together) {
      if (t.count > 1) {
        const auto [begin, end] = widened(t);
        buffered += (end - begin + kBoundary - 1) / kBoundary * kBoundary;
      }
      heads += t.count == 1 ? table.head_of(requests[pieces[t.first].index].sample) : 0;
    }
    std::span<std::byte> room = buffer_.take(std::max<uint64_t>(1, buffered));
    heads_.resize(heads);
    std::span<std::byte> head_room = heads_;
    reads_.clear();
    for (const Together& t : together) {
      RangeRead r;
      r.file = t.file;
      source::ReadRequest& first = requests[pieces[t.first].index];
      r.once = first.once;
      if (t.count == 1) {
        const uint64_t head = table.head_of(first.sample);
        r.offset = t.offset;
        r.head = head_room.first(head);
        head_room = head_room.subspan(head);
        r.into = first.into;
      } else {
        const auto [begin, end] = widened(t);
        r.offset = begin;
        r.into = room.first(end - begin);
        room = room.subspan((end - begin + kBoundary - 1) / kBoundary * kBoundary);
      }
      reads_.push_back(std::move(r));
    }
  }

  // Pieces of a range that could not be read go to `again`: others' bytes may be the bad ones.
  void deal_out(std::span<source::ReadRequest> requests, const std::vector<Piece>& pieces,
                const Together& t, const RangeRead& range, std::vector<Piece>& again) {
    const KeptTable& table = source_.table();
    for (size_t i = t.first; i < t.first + t.count; ++i) {
      source::ReadRequest& request = requests[pieces[i].index];
      std::span<const std::byte> head = range.head;
      if (range.error != 0 && t.count == 1) {
        request.error = range.error;
        request.why = range.why;
        continue;
      }
      if (range.error != 0) {
        again.push_back(pieces[i]);
        continue;
      }
      if (t.count > 1) {
        const auto all = std::span<const std::byte>(range.into)
                             .subspan(pieces[i].offset - range.offset, pieces[i].length);
        head = all.first(table.head_of(request.sample));
        const auto body = all.subspan(head.size());
        if (!body.empty()) std::memcpy(request.into.data(), body.data(), body.size());
      }
      check_head(request, head);
    }
  }

  // All at once: a storage that does not answer is waited for once, not once a sample.
  void read_alone(std::span<source::ReadRequest> requests, const std::vector<Piece>& pieces) {
    std::vector<std::vector<std::byte>> heads;
    reads_.clear();
    for (const Piece& piece : pieces) {
      source::ReadRequest& request = requests[piece.index];
      heads.emplace_back(source_.table().head_of(request.sample));
      RangeRead r;
      r.file = piece.file;
      r.offset = piece.offset;
      r.head = heads.back();
      r.into = request.into;
      reads_.push_back(std::move(r));
    }
    ranges_->read(reads_);
    for (size_t i = 0; i < pieces.size(); ++i) {
      source::ReadRequest& request = requests[pieces[i].index];
      request.error = reads_[i].error;
      request.why = reads_[i].why;
      if (request.error == 0) check_head(request, reads_[i].head);
    }
  }

  void check_head(source::ReadRequest& request, std::span<const std::byte> head) {
    if (head.empty() || !source_.options().check) return;
    request.why = source_.options().check(source_.table(), request.sample, head);
    if (!request.why.empty()) request.error = source::kWrongBytes;
  }

  // Bytes of a file that was written to meanwhile may be anything.
  void check_files(std::span<source::ReadRequest> requests, const std::vector<Together>& together) {
    uint32_t checked = std::numeric_limits<uint32_t>::max();
    for (const Together& t : together) {
      if (t.file == checked) continue;
      checked = t.file;
      const std::string change = source_.changed(t.file, *ranges_);
      if (change.empty()) continue;
      for (source::ReadRequest& r : requests) {
        if (source_.table().file_of(r.sample) != t.file) continue;
        r.error = source::kWrongBytes;
        r.why = source_.storage().files()[t.file].path + ": " + change +
                "; open the data set again when no process writes to it";
      }
    }
  }

  const RecordSource& source_;
  std::unique_ptr<RangeReader> ranges_;
  AlignedBuffer buffer_;
  std::vector<std::byte> heads_;
  std::vector<RangeRead> reads_;
};

uint64_t fingerprint_of(const RecordTable& table) {
  Fnv hash;
  std::string stamp = table.stamp;
  // The last one before what the scan found: names that users gave may have these words too.
  const size_t found = stamp.rfind(" found ");
  if (const size_t at = stamp.rfind(kRules, found); at != std::string::npos) {
    const size_t number = at + kRules.size();
    const size_t end = std::min(stamp.find_first_not_of("0123456789", number), stamp.size());
    if (end > number) stamp.erase(at, end - at);
  }
  hash.text(table.kind).text(stamp).number(table.files.size());
  for (const StorageFile& f : table.files) {
    // The same data set may lie in another folder on another node.
    hash.text(std::string_view(f.path).substr(f.path.rfind('/') + 1)).number(f.size);
  }
  hash.number(table.size());
  for (uint64_t i = 0; i < table.size(); ++i) {
    hash.number(table.file_of(i)).number(table.offset[i]).number(table.length[i]);
    hash.number(static_cast<uint64_t>(table.label[i]));
  }
  if (table.parts != 0) hash.number(table.parts);
  for (size_t i = 0; i < table.part_offset.size(); ++i) {
    hash.number(table.part_offset[i]).number(table.part_length[i]);
  }
  return hash.value();
}

void check_parts(const RecordTable& table) {
  const uint64_t count = table.size() * table.parts;
  if (table.parts > kMostParts || table.part_offset.size() != count ||
      table.part_length.size() != count) {
    throw Error(ErrorKind::usage,
                "a record table must have one part for every sample and field, "
                "of at most " +
                    std::to_string(kMostParts) + " fields");
  }
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t length = table.length[i / table.parts];
    const bool absent = table.part_offset[i] == kNoPart && table.part_length[i] == 0;
    if (!absent && uint64_t{table.part_offset[i]} + table.part_length[i] > length) {
      throw Error(ErrorKind::corruption, "field " + std::to_string(i % table.parts) +
                                             " of sample " + std::to_string(i / table.parts) +
                                             " is not inside its record");
    }
  }
}

}  // namespace

RecordSource::RecordSource(std::shared_ptr<const Storage> storage, RecordTable table,
                           RecordOptions options)
    : storage_(std::move(storage)),
      options_(std::move(options)),
      contents_(storage_->files().size()) {
  const auto files = storage_->files();
  const uint64_t n = table.size();
  if (table.offset.size() != n || table.label.size() != n ||
      (!table.file.empty() && table.file.size() != n) ||
      (!table.head.empty() && table.head.size() != n)) {
    throw Error(ErrorKind::usage, "the columns of a record table must have one entry per sample");
  }
  if (n > std::numeric_limits<uint32_t>::max()) {
    throw Error(ErrorKind::usage, "a data set of records may have at most 2^32 - 1 samples");
  }
  check_parts(table);
  bool in_order = true;
  std::vector<uint32_t> by_place, places;
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t file = table.file_of(i);
    if (file >= files.size() || table.offset[i] > files[file].size ||
        table.length[i] > files[file].size - table.offset[i] ||
        table.head_of(i) > std::min<uint64_t>(table.offset[i], kMaxHead)) {
      throw Error(ErrorKind::corruption, "sample " + std::to_string(i) + " (" +
                                             std::to_string(table.length[i]) + " bytes at offset " +
                                             std::to_string(table.offset[i]) + ") is not inside " +
                                             (file < files.size() ? files[file].path : "any file") +
                                             ": the file was cut, or its index is of another one");
    }
    total_bytes_ += table.length[i];
    if (i > 0) {
      in_order = in_order && std::pair(table.file_of(i - 1), table.offset[i - 1]) <=
                                 std::pair(file, table.offset[i]);
    }
  }
  if (!in_order) {
    by_place.resize(n);
    std::iota(by_place.begin(), by_place.end(), uint32_t{0});
    std::stable_sort(by_place.begin(), by_place.end(), [&](uint32_t a, uint32_t b) {
      return std::pair(table.file_of(a), table.offset[a]) <
             std::pair(table.file_of(b), table.offset[b]);
    });
    places.resize(n);
    for (uint32_t place = 0; place < n; ++place) places[by_place[place]] = place;
  }
  fingerprint_ = fingerprint_of(table);
  keep(std::move(table), std::move(by_place), std::move(places));
}

// Each array is freed once it is copied.
void RecordSource::keep(RecordTable table, std::vector<uint32_t> by_place,
                        std::vector<uint32_t> places) {
  const auto over_all = [&](const auto& visit) {  // in an order that keeps each aligned
    visit(table.offset, table_.offset);
    visit(table.length, table_.length);
    visit(table.label, table_.label);
    visit(table.file, table_.file);
    visit(table.part_offset, table_.part_offset);
    visit(table.part_length, table_.part_length);
    visit(by_place, by_place_);
    visit(places, places_);
    visit(table.head, table_.head);
  };
  uint64_t size = 0;
  over_all([&](const auto& grown, const auto&) { size += std::span(grown).size_bytes(); });
  block_ = std::make_unique<Shareable>(std::max<uint64_t>(1, size));
  std::byte* at = block_->data();
  over_all([&](auto& grown, auto& kept) {
    const std::span from(grown);
    if (!from.empty()) std::memcpy(at, from.data(), from.size_bytes());
    using Array = std::remove_reference_t<decltype(grown)>;
    kept = {reinterpret_cast<const typename Array::value_type*>(at), from.size()};
    at += from.size_bytes();
    grown = Array();
  });
  table_.kind = std::move(table.kind);
  table_.stamp = std::move(table.stamp);
  table_.files = std::move(table.files);
  table_.parts = table.parts;
}

void RecordSource::remember(uint64_t sample, std::span<const std::byte> bytes) const {
  Content& content = contents_[table_.file_of(sample)];
  if (content.count.load(std::memory_order_relaxed) >= kMostRemembered) return;
  const uint32_t sum = sample_sum(bytes);
  const MutexLock lock(contents_mutex_);
  const auto same = [sample](const Remembered& r) { return r.sample == sample; };
  if (content.remembered.size() >= kMostRemembered ||
      std::any_of(content.remembered.begin(), content.remembered.end(), same)) {
    return;
  }
  content.remembered.push_back({sample, sum});
  content.count.store(static_cast<uint32_t>(content.remembered.size()), std::memory_order_relaxed);
}

std::string RecordSource::changed(uint32_t file, RangeReader& reader) const {
  std::string change = storage_->changed(file);
  if (const auto state = options_.state ? options_.state(file) : std::nullopt) {
    std::atomic<uint64_t>& known = contents_[file].state;
    if (known.load(std::memory_order_relaxed) != *state) {
      if (!options_.same(reader, table_, file)) {
        return change.empty() ? "it was written to since it was indexed" : change;
      }
      known.store(*state, std::memory_order_relaxed);
    }
  }
  if (change.empty()) return {};
  const std::optional<Storage::Touched> touched = storage_->touched(file);
  if (!touched) return change;
  // A database is mapped larger without a transaction; of other files more bytes are another content.
  const bool grown = touched->size > storage_->files()[file].size;
  if (grown && !options_.same) return change;
  const MutexLock lock(contents_mutex_);
  Content& content = contents_[file];
  if (content.same == *touched) return {};
  if (options_.same && !options_.same(reader, table_, file)) return change;
  std::vector<Remembered> known = content.remembered;
  for (uint64_t s = 0; content.remembered.empty() && s < size(); ++s) {
    if (known.size() == kMostRemembered) break;
    if (table_.file_of(s) == file && sums().of(s) != 0) known.push_back({s, sums().of(s)});
  }
  if (known.empty() && !grown) return change;  // there is no checksum to compare
  for (const Remembered& r : known) {
    std::vector<std::byte> bytes(table_.length[r.sample]);
    RangeRead range;
    range.file = file;
    range.offset = table_.offset[r.sample];
    range.into = bytes;
    reader.read({&range, 1});
    if (range.error != 0 || sample_sum(bytes) != r.sum) return change;
  }
  content.same = *touched;
  return {};
}

uint64_t RecordSource::place_of(uint64_t sample) const noexcept {
  return places_.empty() ? sample : places_[sample];
}

uint64_t RecordSource::sample_at(uint64_t place) const noexcept {
  return by_place_.empty() ? place : by_place_[place];
}

std::string RecordSource::describe(uint64_t sample) const {
  std::string text = storage_->files()[table_.file_of(sample)].path;
  if (options_.name) {
    if (const std::string name = options_.name(table_, sample); !name.empty())
      text += " \"" + source::printable(name) + "\"";
  }
  return text + " at offset " + std::to_string(table_.offset[sample]);
}

std::unique_ptr<source::Reader> RecordSource::make_reader(source::ReaderKind kind,
                                                          unsigned depth) const {
  return std::make_unique<RecordReader>(*this, kind, depth);
}

Result<std::monostate> RecordSource::locate(uint64_t sample, std::span<const std::byte> record,
                                            std::span<source::FieldBytes> out) const {
  if (table_.parts == 0) return Source::locate(sample, record, out);
  if (out.size() != table_.parts) {
    return Error(ErrorKind::bug, "locate() is given another number of fields");
  }
  if (record.size() != table_.length[sample]) {
    return Error(ErrorKind::corruption, "its record has " + std::to_string(record.size()) +
                                            " bytes instead of " +
                                            std::to_string(table_.length[sample]));
  }
  for (uint32_t f = 0; f < table_.parts; ++f) {
    const size_t part = sample * table_.parts + f;
    const bool present = table_.part_offset[part] != kNoPart;
    out[f] = {{}, present};
    if (present) {
      out[f].bytes = record.subspan(table_.part_offset[part], table_.part_length[part]);
    }
  }
  return std::monostate{};
}

uint64_t RecordSource::batch_bytes() const { return options_.coalesce ? limits().bytes : 0; }

void RecordSource::around(uint64_t sample, std::vector<uint64_t>& out) const {
  if (!options_.coalesce) return;
  const CoalesceLimits limits = this->limits();
  const uint32_t file = table_.file_of(sample);
  uint64_t begin = table_.offset[sample], end = begin + table_.length[sample];
  const uint64_t here = place_of(sample);
  const size_t before = out.size();
  // Half of what a read may have before the sample, the rest after it.
  for (uint64_t place = here; place-- > 0 && out.size() - before < kMostAround / 2;) {
    const uint64_t s = sample_at(place);
    if (table_.file_of(s) != file) break;
    const uint64_t s_end = table_.offset[s] + table_.length[s];
    if (begin > s_end && begin - s_end > limits.gap) break;
    if (end - std::min(begin, table_.offset[s]) > limits.bytes / 2) break;
    begin = std::min(begin, table_.offset[s]);
    out.push_back(s);
  }
  for (uint64_t place = here + 1; place < size() && out.size() - before < kMostAround; ++place) {
    const uint64_t s = sample_at(place);
    if (table_.file_of(s) != file) break;
    if (table_.offset[s] > end && table_.offset[s] - end > limits.gap) break;
    const uint64_t s_end = std::max(end, table_.offset[s] + table_.length[s]);
    if (s_end - begin > limits.bytes) break;
    end = s_end;
    out.push_back(s);
  }
}

}  // namespace nostall::records
