// tokens/units.h - units of a token stream as samples: windows, whole documents, packed pieces.
//
// A unit is a list of segments: runs of tokens of one document, or of the stream where documents do
// not count. Its record (source/unit.h) has the ids of all segments, and with `overlap` one id more
// for each segment that is cut out of a longer document, which the last shifted label needs. What
// the units are follows from the index alone: a window is computed when it is needed, pieces lie in
// a table of 12 bytes each. Which documents are packed into which unit is planned in plan/packing.h.
// Thread-safety: immutable after construction.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "plan/packing.h"
#include "source/source.h"
#include "source/unit.h"
#include "tokens/stream.h"
#include "tokens/stretched.h"

namespace nostall::tokens {

// Unit u is the `length` tokens from u * stride on.
struct Windows {
  uint64_t length = 1, stride = 1;
  bool by_document = false;  // segments end with their document; else a window is one segment
  bool partial = false;      // the last window may have fewer; else what is left is left out
};

// `length` tokens of a document, from its token `begin` on.
struct Piece {
  uint32_t document = 0, begin = 0, length = 0;
};
// Unit u is pieces [offsets[u], offsets[u + 1]), or piece u if there are no offsets.
struct Pieces {
  std::vector<uint64_t> offsets;
  std::vector<Piece> pieces;
  uint64_t units() const noexcept { return offsets.empty() ? pieces.size() : offsets.size() - 1; }
};

// What becomes of a document that is longer than a unit.
enum class Long : uint8_t { cut, split, refuse };
// One unit a document, none for one without tokens, and several for one that is split. `length` 0:
// of any length. Throws Error(usage), with its number, for one that is refused.
Pieces whole_documents(const Documents& documents, uint64_t length, Long longer);

// Packed units (plan/packing.h). Of many documents they are planned by one process of a node, and lie
// in its memory once. `waiting` is called now and then while another process plans, and may throw.
inline constexpr uint64_t kPackedOnce = 1 << 18;  // documents from which on
plan::Units packed(const Documents& documents, const plan::PackSpec& spec,
                   const std::function<void()>& waiting = {});
plan::Units packed(std::span<const uint32_t> lengths, const plan::PackSpec& spec,
                   const std::function<void()>& waiting = {});
// What a node names the packing of these lengths by.
std::string packing_key(std::span<const uint32_t> lengths, const plan::PackSpec& spec);

// Units in which some ids of the stream are several tokens; packed ones, of whole documents or of the
// pieces that cut_documents() makes of them.
struct WithImages {
  std::shared_ptr<const Stretched> stretched;           // null: none
  std::shared_ptr<const std::vector<uint64_t>> pieces;  // null: documents
  int64_t id = 0;                                       // of each of these tokens
  bool mask = false;  // a number of one byte for each token: 0 of an image, 1 of others
};

struct Segment {
  uint64_t begin = 0;  // in the stream
  uint32_t length = 0;
  bool next = false;  // the token behind it is read too

  uint64_t ids() const noexcept { return uint64_t{length} + (next ? 1 : 0); }
};

class UnitSource : public source::Source {
 public:
  // Packed units are those of the lengths of its documents. `fields`: how many fields are unpacked
  // from each record. Throws Error(usage) if there is no unit, or a piece lies outside its document.
  UnitSource(std::shared_ptr<const Stream> stream, std::variant<Windows, Pieces, plan::Units> rule,
             bool overlap, uint32_t fields, WithImages images = {});

  uint64_t size() const override { return sizes_.size(); }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override {
    return {reinterpret_cast<const int64_t*>(zeros_->data()), sizes_.size()};
  }
  uint64_t total_bytes() const override { return total_bytes_; }
  uint64_t fingerprint() const override { return fingerprint_; }
  uint64_t stamp() const override { return stream_->storage().stamp(); }
  bool stamp_covers_samples() const override { return true; }
  bool stamp_tells_content() const override { return stream_->storage().times_tell_content(); }
  bool is_local() const override { return stream_->storage().is_local(); }
  std::string describe(uint64_t sample) const override;
  std::unique_ptr<source::Reader> make_reader(source::ReaderKind kind,
                                              unsigned depth) const override;
  uint32_t fields() const override { return fields_; }
  // Every field is the whole record.
  Result<std::monostate> locate(uint64_t sample, std::span<const std::byte> record,
                                std::span<source::FieldBytes> out) const override;
  Shareable* shareable() const override { return stream_->documents().shareable(); }

  const Stream& stream() const noexcept { return *stream_; }
  // Of all units together, labels alone not counted.
  uint64_t tokens() const noexcept { return tokens_; }
  const std::variant<Windows, Pieces, plan::Units>& rule() const noexcept { return rule_; }
  bool overlap() const noexcept { return overlap_; }
  const WithImages& images() const noexcept { return images_; }
  // Bytes of a number of a record.
  uint32_t width() const noexcept { return images_.mask ? 1 : stream_->width(); }
  // Replaces `out` by the segments of a unit.
  void segments(uint64_t unit, std::vector<Segment>& out) const;

 private:
  void segments_of(const Windows& rule, uint64_t unit, std::vector<Segment>& out) const;
  void segments_of(const Pieces& rule, uint64_t unit, std::vector<Segment>& out) const;
  void segments_of(const plan::Units& rule, uint64_t unit, std::vector<Segment>& out) const;
  void append_piece(const Piece& piece, std::vector<Segment>& out) const;
  uint64_t units() const;
  void find_sizes();
  // Of what is packed, a document or a piece of one.
  uint32_t length_of(uint32_t packed) const noexcept;
  uint64_t begin_of(uint32_t packed) const noexcept {
    return images_.pieces ? (*images_.pieces)[packed] : stream_->documents().begin(packed);
  }
  uint64_t end_of(uint32_t packed) const noexcept {
    return images_.pieces ? (*images_.pieces)[packed + 1] : stream_->documents().end(packed);
  }
  void check(const Pieces& rule) const;

  std::shared_ptr<const Stream> stream_;
  std::variant<Windows, Pieces, plan::Units> rule_;
  bool overlap_;
  uint32_t fields_;
  WithImages images_;
  std::vector<uint64_t> sizes_;
  std::unique_ptr<Shareable> zeros_;  // labels: memory that is not written to takes none
  uint64_t total_bytes_ = 0, fingerprint_ = 0, tokens_ = 0;
};

}  // namespace nostall::tokens
