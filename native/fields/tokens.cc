// The values of a unit of tokens: ids widened, labels shifted by one, places and numbers of segments.
#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>

#include "base/processor.h"
#include "fields/decode.h"
#include "source/unit.h"

namespace nostall::fields {
namespace {

template <typename From, typename To>
inline __attribute__((always_inline)) void copy_each(const std::byte* from, To* to, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) {
    From id;
    std::memcpy(&id, from + i * sizeof id, sizeof id);
    to[i] = static_cast<To>(id);
  }
}

template <typename To>
inline __attribute__((always_inline)) void count_each(To* to, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) to[i] = static_cast<To>(i);
}
template <typename To>
inline __attribute__((always_inline)) void fill_each(To* to, uint64_t n, To value) {
  for (uint64_t i = 0; i < n; ++i) to[i] = value;
}

#if defined(__x86_64__)
// gcc would stay with 256 bits; clang has no such option for one function.
#if defined(__clang__)
#define NOSTALL_WIDE "avx512f,avx512dq"
#else
#define NOSTALL_WIDE "avx512f,avx512dq,prefer-vector-width=512"
#endif
template <typename From, typename To>
__attribute__((target(NOSTALL_WIDE))) void copy_avx512(const std::byte* from, To* to, uint64_t n) {
  copy_each<From, To>(from, to, n);
}
template <typename To>
__attribute__((target(NOSTALL_WIDE))) void count_avx512(To* to, uint64_t n) {
  count_each(to, n);
}
template <typename To>
__attribute__((target(NOSTALL_WIDE))) void fill_avx512(To* to, uint64_t n, To value) {
  fill_each(to, n, value);
}
template <typename From, typename To>
__attribute__((target("avx2"))) void copy_avx2(const std::byte* from, To* to, uint64_t n) {
  copy_each<From, To>(from, to, n);
}
template <typename To>
__attribute__((target("avx2"))) void count_avx2(To* to, uint64_t n) {
  count_each(to, n);
}
template <typename To>
__attribute__((target("avx2"))) void fill_avx2(To* to, uint64_t n, To value) {
  fill_each(to, n, value);
}
#endif

template <typename From, typename To>
void widen(const std::byte* from, To* to, uint64_t n) {
#if defined(__x86_64__)
  if (processor().avx512) return copy_avx512<From, To>(from, to, n);
  if (processor().avx2) return copy_avx2<From, To>(from, to, n);
#endif
  copy_each<From, To>(from, to, n);
}

// 0, 1, 2, ...
template <typename To>
void count(To* to, uint64_t n) {
#if defined(__x86_64__)
  if (processor().avx512) return count_avx512(to, n);
  if (processor().avx2) return count_avx2(to, n);
#endif
  count_each(to, n);
}

template <typename To>
void fill(To* to, uint64_t n, To value) {
#if defined(__x86_64__)
  if (processor().avx512) return fill_avx512(to, n, value);
  if (processor().avx2) return fill_avx2(to, n, value);
#endif
  fill_each(to, n, value);
}

template <typename To>
void widen(Type stored, const std::byte* from, To* to, uint64_t n) {
  switch (stored) {
    case Type::uint8:
      return widen<uint8_t>(from, to, n);
    case Type::uint16:
      return widen<uint16_t>(from, to, n);
    case Type::uint32:
      return widen<uint32_t>(from, to, n);
    case Type::uint64:
      return widen<uint64_t>(from, to, n);
    case Type::int8:
      return widen<int8_t>(from, to, n);
    case Type::int16:
      return widen<int16_t>(from, to, n);
    case Type::int32:
      return widen<int32_t>(from, to, n);
    case Type::float32:
      return widen<float>(from, to, n);
    default:
      return widen<int64_t>(from, to, n);
  }
}

// What stored numbers may be: below `most`, and if they are negative, not below `least`, or `also`.
struct Sound {
  uint64_t most = 0;
  int64_t least = 0;
  std::optional<int64_t> also{};
  std::string what;  // that they are outside of
};

template <typename Id>
Decoded check(const std::byte* from, uint64_t n, const Sound& sound) {
  for (uint64_t i = 0; i < n; ++i) {
    Id id;
    std::memcpy(&id, from + i * sizeof id, sizeof id);
    if (static_cast<uint64_t>(id) < sound.most) continue;
    if constexpr (std::is_signed_v<Id>) {
      if ((id < 0 && id >= sound.least) || (sound.also && id == *sound.also)) continue;
    }
    return Error(ErrorKind::corruption, "its token " + std::to_string(i) + " is " +
                                            std::to_string(id) + ", outside " + sound.what);
  }
  return std::monostate{};
}

Decoded check(Type stored, const std::byte* from, uint64_t n, const Sound& sound) {
  switch (stored) {
    case Type::uint8:
      return check<uint8_t>(from, n, sound);
    case Type::uint16:
      return check<uint16_t>(from, n, sound);
    case Type::uint32:
      return check<uint32_t>(from, n, sound);
    case Type::uint64:
      return check<uint64_t>(from, n, sound);
    case Type::int8:
      return check<int8_t>(from, n, sound);
    case Type::int16:
      return check<int16_t>(from, n, sound);
    case Type::int32:
      return check<int32_t>(from, n, sound);
    default:
      return check<int64_t>(from, n, sound);
  }
}

// Whether every stored number is one of the type that batches have.
bool fits(Type stored, Type type) {
  if (type == Type::float32) return true;
  if (stored == Type::uint64) return false;
  return type == Type::int64 || (stored != Type::uint32 && stored != Type::int64);
}

Decoded check_stored(const Tokens& kind, const source::UnitView& unit) {
  const bool labels = kind.part == Tokens::Part::labels;
  if (kind.part != Tokens::Part::ids && !labels) return std::monostate{};
  uint64_t stored = 0;
  for (uint32_t s = 0; s < unit.segments(); ++s) {
    stored += uint64_t{unit.segment(s).length} + (unit.segment(s).next ? 1 : 0);
  }
  if (kind.vocabulary != 0) {
    Sound sound{kind.vocabulary, 0, std::nullopt,
                "the vocabulary of " + std::to_string(kind.vocabulary)};
    if (labels) sound.also = kind.ignored;
    auto good = check(kind.stored, unit.ids(), stored, sound);
    if (!good) return good;
  }
  if (fits(kind.stored, kind.type)) return std::monostate{};
  const uint64_t most = kind.type == Type::int64 ? uint64_t{1} << 63 : uint64_t{1} << 31;
  return check(kind.stored, unit.ids(), stored,
               {most, -static_cast<int64_t>(most - 1) - 1, std::nullopt,
                "the numbers below " + std::to_string(most)});
}

// A label is kept where the mask of its token, the one behind, is not 0.
template <typename To>
void mask_labels(const Tokens& kind, const source::UnitView& mask, To* to) {
  const size_t width = size_of(*kind.mask);
  const std::byte* from = mask.ids();
  for (uint32_t s = 0; s < mask.segments(); ++s) {
    const auto [length, next] = mask.segment(s);
    const uint64_t ids = uint64_t{length} + (next ? 1 : 0);
    for (uint64_t i = 1; i < ids; ++i) {
      const std::byte* of = from + i * width;
      const bool kept = std::any_of(of, of + width, [](std::byte b) { return b != std::byte{0}; });
      if (!kept) to[i - 1] = static_cast<To>(kind.ignored);
    }
    to += length;
    from += ids * width;
  }
}

template <typename To>
void write(const Tokens& kind, const source::UnitView& unit, To* to) {
  const size_t width = size_of(kind.stored);
  const std::byte* from = unit.ids();
  for (uint32_t s = 0; s < unit.segments(); ++s) {
    const auto [length, next] = unit.segment(s);
    switch (kind.part) {
      case Tokens::Part::ids:
        widen(kind.stored, from, to, length);
        break;
      case Tokens::Part::labels: {
        if (length == 0) break;
        const uint64_t known = next ? length : length - 1;
        widen(kind.stored, from + width, to, known);
        if (!next) to[known] = static_cast<To>(kind.ignored);
        break;
      }
      case Tokens::Part::positions:
        count(to, length);
        break;
      default:
        fill(to, length, static_cast<To>(s + 1));
        break;
    }
    to += length;
    from += (uint64_t{length} + (next ? 1 : 0)) * width;
  }
}

template <typename To>
Decoded write_all(const Tokens& kind, const source::UnitView& unit, const source::UnitView* mask,
                  const Destination& to) {
  const uint64_t tokens = unit.tokens();
  const int64_t length =
      kind.length == 0 ? static_cast<int64_t>(tokens) : static_cast<int64_t>(kind.length);
  To* const out =
      reinterpret_cast<To*>(to.begin({&length, 1}, static_cast<uint64_t>(length) * sizeof(To)));
  write(kind, unit, out);
  if (mask != nullptr) mask_labels(kind, *mask, out);
  const int64_t rest = kind.part == Tokens::Part::ids      ? kind.pad
                       : kind.part == Tokens::Part::labels ? kind.ignored
                                                           : 0;
  std::fill(out + tokens, out + length, static_cast<To>(rest));
  return std::monostate{};
}

Decoded write_all(const Tokens& kind, const source::UnitView& unit, const source::UnitView* mask,
                  const Destination& to) {
  if (kind.type == Type::float32) return write_all<float>(kind, unit, mask, to);
  if (kind.type == Type::int32) return write_all<int32_t>(kind, unit, mask, to);
  return write_all<int64_t>(kind, unit, mask, to);
}

// The lengths of segments, and of what is filled up.
Decoded write_lengths(const Tokens& kind, const source::UnitView& unit, const Destination& to) {
  const uint64_t filled = kind.length == 0 ? 0 : kind.length - unit.tokens();
  const int64_t count = int64_t{unit.segments()} + (filled > 0 ? 1 : 0);
  auto* out = reinterpret_cast<int32_t*>(
      to.begin({&count, 1}, static_cast<uint64_t>(count) * sizeof(int32_t)));
  for (uint32_t s = 0; s < unit.segments(); ++s) {
    *out++ = static_cast<int32_t>(unit.segment(s).length);
  }
  if (filled > 0) *out = static_cast<int32_t>(filled);
  return std::monostate{};
}

}  // namespace

Decoded decode(const Tokens& kind, const Output&, std::span<const std::byte> bytes,
               const image::SampleKey&, Scratch&, const Destination& to) {
  const uint64_t width = size_of(kind.stored);
  std::span<const std::byte> own = bytes;
  if (kind.mask) {
    const auto mask = source::UnitView::last_of(bytes, size_of(*kind.mask));
    if (!mask) return mask.error();
    own = bytes.first(bytes.size() - mask.value().bytes());
  }
  const auto viewed = source::UnitView::of(own, width);
  if (!viewed) return viewed.error();
  const source::UnitView& unit = viewed.value();
  if (kind.length != 0 && unit.tokens() > kind.length) {
    return Error(ErrorKind::corruption, "a unit has " + std::to_string(unit.tokens()) +
                                            " tokens, more than " + std::to_string(kind.length));
  }
  if (kind.part == Tokens::Part::lengths) return write_lengths(kind, unit, to);
  auto good = check_stored(kind, unit);
  if (!good) return good;
  if (kind.mask) {
    const auto mask = source::UnitView::last_of(bytes, size_of(*kind.mask));
    if (!mask) return mask.error();
    if (!mask.value().divided_as(unit)) {
      return Error(ErrorKind::corruption, "its mask is of other segments");
    }
    return write_all(kind, unit, &mask.value(), to);
  }
  return write_all(kind, unit, nullptr, to);
}

}  // namespace nostall::fields
