// Records of several samples, read together, and the table behind them.
#include "source/gather.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/crc32c.h"
#include "base/fnv.h"

namespace nostall::source {
namespace {

constexpr uint64_t kEntry = 12;  // bytes of a member in the table

[[noreturn]] void usage(const std::string& what) { throw Error(ErrorKind::usage, what); }

constexpr uint64_t rounded(uint64_t bytes) noexcept { return (bytes + 3) / 4 * 4; }

std::byte* put(std::byte* to, uint32_t word) noexcept {
  std::memcpy(to, &word, sizeof word);
  return to + sizeof word;
}

}  // namespace

class GatherSource::MembersReader : public Reader {
 public:
  MembersReader(const GatherSource& source, ReaderKind kind, unsigned depth)
      : source_(source), reader_(source.source_->make_reader(kind, depth)) {}

  void read(std::span<ReadRequest> requests) override {
    const Source& inner = *source_.source_;
    asked_.clear();
    owner_.clear();
    for (size_t r = 0; r < requests.size(); ++r) {
      ReadRequest& request = requests[r];
      request.error = 0;
      request.why.clear();
      std::byte* to = request.into.data();
      const auto members = source_.members_of(request.sample);
      for (const Member& member : members) {
        const auto size = static_cast<size_t>(inner.sizes()[member.sample]);
        asked_.push_back({member.sample, {to, size}, 0, request.once});
        owner_.push_back(r);
        to += size;
      }
      while ((to - request.into.data()) % 4 != 0) *to++ = std::byte{0};
      for (const Member& member : members) {
        to = put(to, static_cast<uint32_t>(inner.sizes()[member.sample]));
        to = put(to, member.first);
        to = put(to, member.second);
      }
      put(to, static_cast<uint32_t>(members.size()));
    }
    reader_->read(asked_);
    fields_.resize(inner.fields());
    for (size_t i = 0; i < asked_.size(); ++i) {
      ReadRequest& request = requests[owner_[i]];
      if (request.error != 0) continue;
      const std::string name = inner.describe(asked_[i].sample) + ": ";
      if (asked_[i].error != 0) {
        request.error = asked_[i].error;
        request.why = name + read_error_text(asked_[i]);
        continue;
      }
      const auto located = inner.locate(asked_[i].sample, asked_[i].into, fields_);
      if (!located || fields_.front().bytes.size() != asked_[i].into.size()) {
        request.error = kWrongBytes;
        request.why = name + (located ? "its record has more than the image: gather images of a "
                                        "source that has them as files or members"
                                      : std::string(located.error().what()));
      }
    }
  }
  std::string_view name() const override { return reader_->name(); }

 private:
  const GatherSource& source_;
  std::unique_ptr<Reader> reader_;
  std::vector<ReadRequest> asked_;
  std::vector<size_t> owner_;  // of each member, the number of its request
  std::vector<FieldBytes> fields_;
};

GatherSource::GatherSource(std::shared_ptr<const Source> source, std::vector<uint64_t> begins,
                           std::vector<Member> members)
    : source_(std::move(source)), begins_(std::move(begins)), members_(std::move(members)) {
  if (begins_.empty() || begins_.front() != 0 || begins_.back() != members_.size() ||
      !std::is_sorted(begins_.begin(), begins_.end())) {
    usage("the beginnings of gathered samples must rise from 0 to the number of members");
  }
  const auto sizes = source_->sizes();
  sizes_.resize(begins_.size() - 1);
  labels_.resize(sizes_.size());
  for (uint64_t u = 0; u < sizes_.size(); ++u) {
    uint64_t bytes = 0;
    for (const Member& member : members_of(u)) {
      if (member.sample >= sizes.size()) {
        usage("sample " + std::to_string(member.sample) + " is none of the " +
              std::to_string(sizes.size()) + " that are gathered");
      }
      if (sizes[member.sample] > std::numeric_limits<uint32_t>::max()) {
        usage(source_->describe(member.sample) + " has 2^32 bytes or more");
      }
      bytes += sizes[member.sample];
    }
    sizes_[u] = rounded(bytes) + kEntry * members_of(u).size() + 4;
    total_ += sizes_[u];
  }
  fingerprint_ = Fnv(source_->fingerprint())
                     .number(crc32c(std::as_bytes(std::span(begins_))))
                     .number(crc32c(std::as_bytes(std::span(members_))))
                     .number(members_.size())
                     .value();
}

std::string GatherSource::describe(uint64_t sample) const {
  const auto members = members_of(sample);
  if (members.empty()) return "no samples";
  const std::string first = source_->describe(members.front().sample);
  return members.size() == 1 ? first
                             : first + " and " + std::to_string(members.size() - 1) + " more";
}

std::unique_ptr<Reader> GatherSource::make_reader(ReaderKind kind, unsigned depth) const {
  return std::make_unique<MembersReader>(*this, kind, depth);
}

Result<std::monostate> GatherSource::locate(uint64_t, std::span<const std::byte> record,
                                            std::span<FieldBytes> out) const {
  std::fill(out.begin(), out.end(), FieldBytes{record, true});
  return std::monostate{};
}

uint32_t GatheredView::word(uint64_t at) const noexcept {
  uint32_t value;
  std::memcpy(&value, record_.data() + at, sizeof value);
  return value;
}

Result<GatheredView> GatheredView::of(std::span<const std::byte> record) {
  const auto damaged = [&] {
    return Error(ErrorKind::corruption, "a record of " + std::to_string(record.size()) +
                                            " bytes is not of gathered samples");
  };
  if (record.size() < 4 || record.size() % 4 != 0) return damaged();
  GatheredView view;
  view.record_ = record;
  view.count_ = view.word(record.size() - 4);
  if (view.count_ > (record.size() - 4) / kEntry) return damaged();
  view.table_ = record.size() - 4 - kEntry * view.count_;
  uint64_t bytes = 0;
  for (uint64_t i = 0; i < view.count_; ++i) bytes += view.word(view.table_ + kEntry * i);
  if (rounded(bytes) != view.table_) return damaged();
  return view;
}

GatheredView::Member GatheredView::next() noexcept {
  const uint32_t bytes = word(table_);
  const Member member{record_.subspan(at_, bytes), word(table_ + 4), word(table_ + 8)};
  at_ += bytes;
  table_ += kEntry;
  return member;
}

}  // namespace nostall::source
