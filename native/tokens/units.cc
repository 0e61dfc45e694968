// Segments of units, and the reader that puts their records together.
#include "tokens/units.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/crc32c.h"
#include "base/fnv.h"
#include "base/log.h"
#include "base/node_once.h"

namespace nostall::tokens {
namespace {

// For a process that plans a packing: of 2^31 documents some minutes.
constexpr std::chrono::minutes kPatience{10};

[[noreturn]] void usage(const std::string& what) { throw Error(ErrorKind::usage, what); }

void append(std::byte*& to, uint32_t word) {
  std::memcpy(to, &word, sizeof word);
  to += sizeof word;
}

plan::Units packed_once(const std::string& key,
                        const std::function<std::unique_ptr<SealedMemory>()>& plan,
                        const std::function<bool(const plan::Units&)>& sound,
                        const std::function<void()>& waiting) {
  // Gives the block to other processes for as long as it is used here.
  struct Shared {
    explicit Shared(const std::string& name) : once(name) {}
    NodeOnce once;
    std::unique_ptr<SealedMemory> block;
  };
  const auto shared = std::make_shared<Shared>(key);
  plan::Units units;
  const auto make = [&] {
    shared->block = plan();
    std::vector<Descriptor> files;
    try {
      files.push_back(shared->block->seal());
    } catch (const Error& error) {
      log(LogLevel::warning, std::string(error.what()) + "; each process packs for itself");
    }
    units = plan::Units::of({shared, shared->block.get()});
    return files;
  };
  const auto use = [&](const NodeOnce::Files& files) {
    shared->block = std::make_unique<SealedMemory>(files.at(0));
    units = plan::Units::of({shared, shared->block.get()});
    if (!sound(units)) {
      throw Error(ErrorKind::corruption, "what another process shares is of other documents");
    }
  };
  shared->once.get(make, use, kPatience, waiting);
  return units;
}

std::string key_of(const plan::PackSpec& spec, uint64_t documents) {
  return "packing " +
         std::to_string(
             Fnv(documents).number(plan::kPackBlock).number(plan::fingerprint(spec)).value());
}

// Lengths of documents, as plan::Units takes them.
struct Lengths {
  std::span<const uint32_t> lengths;
  uint64_t size() const noexcept { return lengths.size(); }
  uint32_t length(uint64_t i) const noexcept { return lengths[i]; }
  void prefetch(uint64_t i) const noexcept { __builtin_prefetch(lengths.data() + i); }
};

// One thread's reader: the ranges of all requests of a call in one call of the storage.
class UnitReader : public source::Reader {
 public:
  UnitReader(const UnitSource& source, source::ReaderKind kind, unsigned depth)
      : source_(source), reader_(source.stream().storage().make_reader(kind, depth)) {}

  void read(std::span<source::ReadRequest> requests) override {
    ranges_.clear();
    owner_.clear();
    const Stream& stream = source_.stream();
    for (size_t i = 0; i < requests.size(); ++i) {
      source::ReadRequest& request = requests[i];
      request.error = 0;
      request.why.clear();
      source_.segments(request.sample, segments_);
      std::byte* to = request.into.data();
      const bool stretched = source_.images().stretched != nullptr;
      for (size_t s = 0; stretched && s < segments_.size(); ++s) to = stretch(segments_[s], to);
      for (size_t s = 0; !stretched && s < segments_.size();) {
        // Segments that follow each other in the stream are one range.
        const uint64_t begin = segments_[s].begin;
        uint64_t ids = 0;
        do {
          ids += segments_[s++].ids();
        } while (s < segments_.size() && segments_[s].begin == begin + ids);
        stream.ranges(begin, ids, to, ranges_);
        to += ids * stream.width();
      }
      for (size_t r = owner_.size(); r < ranges_.size(); ++r) ranges_[r].once = request.once;
      owner_.resize(ranges_.size(), i);
      finish(request, to);
    }
    reader_->read(ranges_);
    for (size_t r = 0; r < ranges_.size(); ++r) {
      if (ranges_[r].error == 0) continue;
      requests[owner_[r]].error = ranges_[r].error;
      requests[owner_[r]].why = std::move(ranges_[r].why);
    }
    check_files(requests);
  }
  std::string_view name() const override { return reader_->name(); }

 private:
  // The ranges of a segment with images, which are filled in; where it ends.
  std::byte* stretch(const Segment& segment, std::byte* to) {
    const Stretched& stretched = *source_.images().stretched;
    uint64_t at = segment.begin, left = segment.length;
    size_t i = stretched.first(at);  // the image at `at` or behind it
    const auto is_image = [&] { return i < stretched.size() && stretched.place(i) == at; };
    while (left > 0) {
      const uint64_t text = i < stretched.size() ? std::min(left, stretched.place(i) - at) : left;
      to = write_text(at, text, to);
      at += text;
      left -= text;
      if (left == 0) break;
      to = write_image(stretched.cost(i), to);
      left -= stretched.cost(i++);
      ++at;
    }
    if (!segment.next) return to;
    return is_image() ? write_image(1, to) : write_text(at, 1, to);
  }
  std::byte* write_text(uint64_t begin, uint64_t tokens, std::byte* to) {
    if (source_.images().mask) {
      std::fill_n(to, tokens, std::byte{1});
    } else if (tokens > 0) {
      source_.stream().ranges(begin, tokens, to, ranges_);
    }
    return to + tokens * source_.width();
  }
  std::byte* write_image(uint64_t tokens, std::byte* to) const {
    const int64_t filled = source_.images().mask ? 0 : source_.images().id;
    for (; tokens > 0; --tokens, to += source_.width()) std::memcpy(to, &filled, source_.width());
    return to;
  }
  // What lies behind the ids.
  void finish(const source::ReadRequest& request, std::byte* to) const {
    const size_t ids = static_cast<size_t>(to - request.into.data());
    for (size_t pad = source::unit_table(ids, 1) - ids; pad > 0; --pad) *to++ = std::byte{0};
    for (const Segment& s : segments_) append(to, 2 * s.length + (s.next ? 1 : 0));
    append(to, static_cast<uint32_t>(segments_.size()));
  }

  // Bytes of a file that was written to meanwhile may be anything.
  void check_files(std::span<source::ReadRequest> requests) {
    const records::Storage& storage = source_.stream().storage();
    files_.clear();
    for (const records::RangeRead& range : ranges_) {
      if (std::find(files_.begin(), files_.end(), range.file) == files_.end()) {
        files_.push_back(range.file);
      }
    }
    for (const uint32_t file : files_) {
      const std::string change = storage.changed(file);
      if (change.empty()) continue;
      for (size_t r = 0; r < ranges_.size(); ++r) {
        if (ranges_[r].file != file) continue;
        requests[owner_[r]].error = source::kWrongBytes;
        requests[owner_[r]].why = storage.files()[file].path + ": " + change +
                                  "; open the tokens again when no process writes to it";
      }
    }
  }

  const UnitSource& source_;
  std::unique_ptr<records::RangeReader> reader_;
  std::vector<records::RangeRead> ranges_;
  std::vector<size_t> owner_;  // of each range, the number of its request
  std::vector<Segment> segments_;
  std::vector<uint32_t> files_;
};

}  // namespace

Pieces whole_documents(const Documents& documents, uint64_t length, Long longer) {
  Pieces made;
  for (uint64_t d = 0; d < documents.size(); ++d) {
    uint32_t left = documents.length(d);
    const auto most =
        static_cast<uint32_t>(length == 0 ? left : std::min<uint64_t>(length, source::kMostUnit));
    if (left > most && longer == Long::refuse) {
      usage("document " + std::to_string(d) + " has " + std::to_string(left) +
            " tokens, more than the length of " + std::to_string(length) +
            ": pass longer=\"cut\" or \"split\", or a larger length");
    }
    for (uint32_t begin = 0; left > 0;) {
      const uint32_t taken = std::min(left, most);
      made.pieces.push_back({static_cast<uint32_t>(d), begin, taken});
      begin += taken;
      left = longer == Long::split ? left - taken : 0;
    }
  }
  return made;
}

plan::Units packed(const Documents& documents, const plan::PackSpec& spec,
                   const std::function<void()>& waiting) {
  const auto lengths = [&] {
    std::vector<uint32_t> all(documents.size());
    for (uint64_t d = 0; d < all.size(); ++d) all[d] = documents.length(d);
    return all;
  };
  if (documents.size() < kPackedOnce) return plan::pack(lengths(), spec);
  const auto plan = [&] { return plan::pack_block(lengths(), spec); };
  const auto sound = [&](const plan::Units& units) { return units.are_of(documents, spec); };
  Fnv content(documents.fingerprint());
  for (const uint32_t low : documents.low()) content.word(low);
  return packed_once(key_of(spec, content.value()), plan, sound, waiting);
}

std::string packing_key(std::span<const uint32_t> lengths, const plan::PackSpec& spec) {
  Fnv content;
  content.number(lengths.size());
  for (const uint32_t length : lengths) content.word(length);
  return key_of(spec, content.value());
}

plan::Units packed(std::span<const uint32_t> lengths, const plan::PackSpec& spec,
                   const std::function<void()>& waiting) {
  if (lengths.size() < kPackedOnce) return plan::pack(lengths, spec);
  const auto plan = [&] { return plan::pack_block(lengths, spec); };
  const auto sound = [&](const plan::Units& units) { return units.are_of(Lengths{lengths}, spec); };
  return packed_once(packing_key(lengths, spec), plan, sound, waiting);
}

UnitSource::UnitSource(std::shared_ptr<const Stream> stream,
                       std::variant<Windows, Pieces, plan::Units> rule, bool overlap,
                       uint32_t fields, WithImages images)
    : stream_(std::move(stream)),
      rule_(std::move(rule)),
      overlap_(overlap),
      fields_(fields),
      images_(std::move(images)) {
  Fnv hash(stream_->fingerprint());
  hash.number(overlap ? 1 : 0).number(rule_.index());
  if (const auto* windows = std::get_if<Windows>(&rule_)) {
    if (windows->length == 0 || windows->length >= source::kMostUnit || windows->stride == 0) {
      usage("a window has 1 to 2^30 - 1 tokens, and a stride of 1 or more");
    }
    hash.number(windows->length).number(windows->stride).number(windows->by_document ? 1 : 0);
    hash.number(windows->partial ? 1 : 0);
  } else if (const auto* pieces = std::get_if<Pieces>(&rule_)) {
    check(*pieces);
    hash.number(crc32c(std::as_bytes(std::span(pieces->offsets))));
    hash.number(crc32c(std::as_bytes(std::span(pieces->pieces)))).number(pieces->pieces.size());
  } else {
    const auto& units = std::get<plan::Units>(rule_);
    hash.number(units.capacity).number(static_cast<uint64_t>(units.longer));
    hash.number(units.checksum).number(units.pieces.size());
  }
  if (images_.stretched) {
    hash.number(images_.stretched->fingerprint()).number(static_cast<uint64_t>(images_.id));
    hash.number(images_.mask ? 1 : 0);
    if (images_.pieces) hash.number(crc32c(std::as_bytes(std::span(*images_.pieces))));
  }
  fingerprint_ = hash.value();
  sizes_.resize(units());
  if (sizes_.empty()) {
    usage("there is not one unit in " + std::to_string(stream_->tokens()) +
          " tokens: pass a smaller length, or keep what is left over");
  }
  zeros_ = std::make_unique<Shareable>(sizes_.size() * sizeof(int64_t));
  find_sizes();
}

void UnitSource::find_sizes() {
  const auto take = [this](uint64_t unit, uint64_t ids, uint64_t segments) {
    if (ids > source::kMostUnit) {
      usage("unit " + std::to_string(unit) + " has more than 2^30 tokens");
    }
    sizes_[unit] = source::unit_bytes(ids, width(), segments);
    total_bytes_ += sizes_[unit];
  };
  // Which pieces go on is not in a packing of pieces.
  if (const auto* packed = std::get_if<plan::Units>(&rule_); packed && !images_.pieces) {
    for (uint64_t u = 0; u < sizes_.size(); ++u) {
      const auto [tokens, open] = packed->contents[u];
      take(u, uint64_t{tokens} + (overlap_ ? open : 0), (*packed)[u].size());
    }
    tokens_ = packed->tokens;
    return;
  }
  std::vector<Segment> found;
  for (uint64_t u = 0; u < sizes_.size(); ++u) {
    segments(u, found);
    uint64_t ids = 0;
    for (const Segment& s : found) {
      ids += s.ids();
      tokens_ += s.length;
    }
    take(u, ids, found.size());
  }
}

uint64_t UnitSource::units() const {
  if (const auto* pieces = std::get_if<Pieces>(&rule_)) return pieces->units();
  if (const auto* packed = std::get_if<plan::Units>(&rule_)) return packed->size();
  const auto* windows = std::get_if<Windows>(&rule_);
  // A window needs a label for its last token.
  const uint64_t extra = overlap_ ? 1 : 0;
  const uint64_t usable = stream_->tokens() - std::min(stream_->tokens(), extra);
  if (usable == 0) return 0;
  const uint64_t beyond = usable - std::min(usable, windows->length);
  if (windows->partial) {
    // Until the stream is covered; strides longer than a window may pass its end.
    return std::min(1 + (beyond + windows->stride - 1) / windows->stride,
                    1 + (usable - 1) / windows->stride);
  }
  return usable < windows->length ? 0 : 1 + beyond / windows->stride;
}

void UnitSource::check(const Pieces& rule) const {
  const Documents& documents = stream_->documents();
  if (documents.size() > (uint64_t{1} << 32)) usage("pieces are of at most 2^32 documents");
  if (!rule.offsets.empty() &&
      (rule.offsets.front() != 0 || rule.offsets.back() != rule.pieces.size() ||
       !std::is_sorted(rule.offsets.begin(), rule.offsets.end()))) {
    usage("the offsets of units must rise from 0 to the number of pieces");
  }
  for (const Piece& p : rule.pieces) {
    if (p.document >= documents.size() ||
        uint64_t{p.begin} + p.length > documents.length(p.document)) {
      usage("a piece of " + std::to_string(p.length) + " tokens from token " +
            std::to_string(p.begin) + " on is not inside document " + std::to_string(p.document));
    }
    if (p.length >= source::kMostUnit) usage("a piece has more than 2^30 - 1 tokens");
  }
}

void UnitSource::segments(uint64_t unit, std::vector<Segment>& out) const {
  out.clear();
  std::visit([&](const auto& rule) { segments_of(rule, unit, out); }, rule_);
}

void UnitSource::segments_of(const Windows& rule, uint64_t unit, std::vector<Segment>& out) const {
  const uint64_t begin = unit * rule.stride, tokens = stream_->tokens();
  const uint64_t usable = tokens - (overlap_ ? 1 : 0);
  const uint64_t end = std::min(begin + rule.length, usable);
  if (!rule.by_document) {
    out.push_back({begin, static_cast<uint32_t>(end - begin), overlap_});
    return;
  }
  const Documents& documents = stream_->documents();
  uint64_t at = begin;
  for (uint64_t d = documents.at(begin); at < end; ++d) {
    const uint64_t last = std::min(documents.end(d), end);
    if (last == at) continue;  // a document without tokens
    const bool next = overlap_ && last < documents.end(d);
    out.push_back({at, static_cast<uint32_t>(last - at), next});
    at = last;
  }
}

uint32_t UnitSource::length_of(uint32_t packed) const noexcept {
  if (!images_.stretched) return stream_->documents().length(packed);
  return static_cast<uint32_t>(images_.stretched->length(begin_of(packed), end_of(packed)));
}

void UnitSource::append_piece(const Piece& piece, std::vector<Segment>& out) const {
  const Documents& documents = stream_->documents();
  const uint64_t begin = begin_of(piece.document) + piece.begin;
  bool next = overlap_;
  if (images_.pieces) {
    next = next && end_of(piece.document) < documents.end(documents.at(begin));
  } else {
    next = next && !images_.stretched && begin + piece.length < documents.end(piece.document);
  }
  out.push_back({begin, piece.length, next});
}

void UnitSource::segments_of(const Pieces& rule, uint64_t unit, std::vector<Segment>& out) const {
  const uint64_t first = rule.offsets.empty() ? unit : rule.offsets[unit];
  const uint64_t end = rule.offsets.empty() ? unit + 1 : rule.offsets[unit + 1];
  for (uint64_t i = first; i < end; ++i) append_piece(rule.pieces[i], out);
}

void UnitSource::segments_of(const plan::Units& rule, uint64_t unit,
                             std::vector<Segment>& out) const {
  const Documents& documents = stream_->documents();
  // They lie anywhere: their misses overlap.
  for (const plan::Piece& p : rule[unit]) {
    if (!images_.pieces) documents.prefetch(p.document);
  }
  uint32_t filled = 0;
  for (const plan::Piece& p : rule[unit]) {
    const uint32_t length = rule.length_of(p, length_of(p.document), filled);
    append_piece({p.document, p.begin, length}, out);
    filled += length;
  }
}

std::string UnitSource::describe(uint64_t sample) const {
  std::vector<Segment> found;
  segments(sample, found);
  uint64_t tokens = 0;
  for (const Segment& s : found) tokens += s.length;
  if (found.empty()) return "a unit without tokens";
  const Documents& documents = stream_->documents();
  const uint64_t begin = found.front().begin;
  uint64_t first = found.front().length;
  if (images_.pieces) {
    first = *std::upper_bound(images_.pieces->begin(), images_.pieces->end(), begin) - begin;
  } else if (images_.stretched) {
    first = documents.end(documents.at(begin)) - begin;
  }
  if (found.size() == 1 || std::holds_alternative<Windows>(rule_)) {
    return stream_->describe(found.front().begin, images_.stretched ? first : tokens);
  }
  return stream_->describe(found.front().begin, first) + " and " +
         std::to_string(found.size() - 1) + " more pieces";
}

std::unique_ptr<source::Reader> UnitSource::make_reader(source::ReaderKind kind,
                                                        unsigned depth) const {
  return std::make_unique<UnitReader>(*this, kind, depth);
}

Result<std::monostate> UnitSource::locate(uint64_t, std::span<const std::byte> record,
                                          std::span<source::FieldBytes> out) const {
  std::fill(out.begin(), out.end(), source::FieldBytes{record, true});
  return std::monostate{};
}

}  // namespace nostall::tokens
