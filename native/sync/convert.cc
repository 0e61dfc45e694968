// Conversions of floating-point arrays, one loop for each pair of types.
#include "sync/convert.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "base/error.h"

namespace nostall::sync {
namespace {

using collective::DataType;

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

float widen(float v) { return v; }
double widen(double v) { return v; }
float widen(Brain v) { return std::bit_cast<float>(uint32_t{v.bits} << 16); }
float widen(Half v) {
  const uint32_t sign = uint32_t{v.bits & 0x8000u} << 16;
  const uint32_t rest = v.bits & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // The exponent is moved by a multiplication, which gets subnormal numbers right too.
  const float value = std::bit_cast<float>(rest << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

template <typename T>
T narrow(double v);
template <>
double narrow(double v) {
  return v;
}
template <>
float narrow(double v) {
  return static_cast<float>(v);
}
template <>
Brain narrow(double v) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(v));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
Half narrow(double v) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(v));
  const uint32_t sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (rest >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // too large
  if (rest < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the bits that are kept, rounded, at the low end.
    const float moved = std::bit_cast<float>(rest) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(moved) - 0x3f000000u))};
  }
  const uint32_t rounded = rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u);
  return {static_cast<uint16_t>(sign | rounded >> 13)};
}

template <typename Function>
auto with_type(DataType type, Function&& function) {
  switch (type) {
    case DataType::float16:
      return function(Half{});
    case DataType::bfloat16:
      return function(Brain{});
    case DataType::float64:
      return function(double{});
    case DataType::float32:
      return function(float{});
    default:
      throw Error(ErrorKind::usage, "gradients of type " + std::string(collective::name_of(type)) +
                                        " cannot be reduced: they must be floating point");
  }
}

}  // namespace

bool is_floating(DataType type) noexcept {
  return type == DataType::float16 || type == DataType::bfloat16 || type == DataType::float32 ||
         type == DataType::float64;
}

void scale_into(void* to, DataType to_type, const void* from, DataType from_type, uint64_t count,
                double scale) {
  if (to_type == from_type && scale == 1.0) {
    if (count > 0) std::memmove(to, from, count * collective::size_of(to_type));
    return;
  }
  with_type(to_type, [&](auto to_tag) {
    with_type(from_type, [&](auto from_tag) {
      using To = decltype(to_tag);
      using From = decltype(from_tag);
      auto* out = static_cast<To*>(to);
      const auto* in = static_cast<const From*>(from);
      if constexpr (std::is_same_v<From, double>) {
        for (uint64_t i = 0; i < count; ++i) out[i] = narrow<To>(in[i] * scale);
      } else {
        const auto factor = static_cast<float>(scale);
        for (uint64_t i = 0; i < count; ++i) {
          const float product = widen(in[i]) * factor;
          if constexpr (std::is_same_v<To, float>) {
            out[i] = product;
          } else {
            out[i] = narrow<To>(static_cast<double>(product));
          }
        }
      }
    });
  });
}

double number_at(const void* data, DataType type, uint64_t at) {
  return with_type(type, [&](auto tag) {
    return static_cast<double>(widen(static_cast<const decltype(tag)*>(data)[at]));
  });
}

void set_number(void* data, DataType type, uint64_t at, double value) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    static_cast<T*>(data)[at] = narrow<T>(value);
  });
}

uint64_t first_not_finite(const void* data, DataType type, uint64_t count) {
  return with_type(type, [&](auto tag) {
    const auto* values = static_cast<const decltype(tag)*>(data);
    for (uint64_t i = 0; i < count; ++i) {
      if (!std::isfinite(widen(values[i]))) return i;
    }
    return count;
  });
}

}  // namespace nostall::sync
