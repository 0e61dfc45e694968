// The values of a unit of tokens: ids widened, labels shifted by one, places and numbers of segments.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

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

#if defined(__x86_64__)
template <typename From, typename To>
__attribute__((target("avx2"))) void copy_avx2(const std::byte* from, To* to, uint64_t n) {
  copy_each<From, To>(from, to, n);
}
#endif

template <typename From, typename To>
void widen(const std::byte* from, To* to, uint64_t n) {
#if defined(__x86_64__)
  if (processor().avx2) return copy_avx2<From, To>(from, to, n);
#endif
  copy_each<From, To>(from, to, n);
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
    default:
      return widen<int64_t>(from, to, n);
  }
}

template <typename Id>
Decoded check_below(const std::byte* from, uint64_t n, uint64_t most, const char* what) {
  for (uint64_t i = 0; i < n; ++i) {
    Id id;
    std::memcpy(&id, from + i * sizeof id, sizeof id);
    if (static_cast<uint64_t>(id) < most) continue;
    return Error(ErrorKind::corruption, "its token " + std::to_string(i) + " is " +
                                            std::to_string(id) + ", outside " + what +
                                            std::to_string(most));
  }
  return std::monostate{};
}

Decoded check_below(Type stored, const std::byte* from, uint64_t n, uint64_t most,
                    const char* what) {
  switch (stored) {
    case Type::uint8:
      return check_below<uint8_t>(from, n, most, what);
    case Type::uint16:
      return check_below<uint16_t>(from, n, most, what);
    case Type::uint32:
      return check_below<uint32_t>(from, n, most, what);
    case Type::uint64:
      return check_below<uint64_t>(from, n, most, what);
    case Type::int8:
      return check_below<int8_t>(from, n, most, what);
    case Type::int16:
      return check_below<int16_t>(from, n, most, what);
    case Type::int32:
      return check_below<int32_t>(from, n, most, what);
    default:
      return check_below<int64_t>(from, n, most, what);
  }
}

// Whether every stored number is one of the type that batches have.
bool fits(Type stored, Type type) {
  if (stored == Type::uint64) return false;
  return type == Type::int64 || (stored != Type::uint32 && stored != Type::int64);
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
        std::iota(to, to + length, To{0});
        break;
      default:
        std::fill_n(to, length, static_cast<To>(s + 1));
        break;
    }
    to += length;
    from += (uint64_t{length} + (next ? 1 : 0)) * width;
  }
}

template <typename To>
Decoded write_all(const Tokens& kind, const source::UnitView& unit, const Destination& to) {
  const uint64_t tokens = unit.tokens();
  const int64_t length =
      kind.length == 0 ? static_cast<int64_t>(tokens) : static_cast<int64_t>(kind.length);
  To* const out =
      reinterpret_cast<To*>(to.begin({&length, 1}, static_cast<uint64_t>(length) * sizeof(To)));
  write(kind, unit, out);
  const int64_t rest = kind.part == Tokens::Part::ids      ? kind.pad
                       : kind.part == Tokens::Part::labels ? kind.ignored
                                                           : 0;
  std::fill(out + tokens, out + length, static_cast<To>(rest));
  return std::monostate{};
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
  const auto viewed = source::UnitView::of(bytes, width);
  if (!viewed) return viewed.error();
  const source::UnitView& unit = viewed.value();
  if (kind.length != 0 && unit.tokens() > kind.length) {
    return Error(ErrorKind::corruption, "a unit has " + std::to_string(unit.tokens()) +
                                            " tokens, more than " + std::to_string(kind.length));
  }
  if (kind.part == Tokens::Part::lengths) return write_lengths(kind, unit, to);
  if (kind.part == Tokens::Part::ids) {
    uint64_t stored = 0;
    for (uint32_t s = 0; s < unit.segments(); ++s) {
      stored += uint64_t{unit.segment(s).length} + (unit.segment(s).next ? 1 : 0);
    }
    if (kind.vocabulary != 0) {
      auto good =
          check_below(kind.stored, unit.ids(), stored, kind.vocabulary, "the vocabulary of ");
      if (!good) return good;
    }
    if (!fits(kind.stored, kind.type)) {
      const uint64_t most = kind.type == Type::int64 ? uint64_t{1} << 63 : uint64_t{1} << 31;
      auto good = check_below(kind.stored, unit.ids(), stored, most, "the numbers below ");
      if (!good) return good;
    }
  }
  if (kind.type == Type::int32) return write_all<int32_t>(kind, unit, to);
  return write_all<int64_t>(kind, unit, to);
}

}  // namespace nostall::fields
