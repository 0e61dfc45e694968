// collective/kernels_body.h - the loops themselves; included by one file per instruction set, each
// of which compiles its own copy (hence the anonymous namespace).
#pragma once

#include <bit>
#include <complex>
#include <cstdint>
#include <type_traits>

#include "collective/kernels.h"

#if defined(__clang__)
#define NOSTALL_SAME_INDEX_ONLY _Pragma("clang loop vectorize(assume_safety)")
#else
#define NOSTALL_SAME_INDEX_ONLY _Pragma("GCC ivdep")
#endif

namespace nostall::collective {
namespace {

// 16-bit floats are computed in float32 and rounded to nearest even.
struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

inline float widen(Half h) {
  const uint32_t sign = uint32_t{h.bits & 0x8000u} << 16, rest = h.bits & 0x7fffu;
  const uint32_t scaled =
      std::bit_cast<uint32_t>(std::bit_cast<float>(rest << 13) * std::bit_cast<float>(0x77800000u));
  const uint32_t special = 0x7f800000u | (rest << 13);
  return std::bit_cast<float>(sign | (rest >= 0x7c00u ? special : scaled));
}
inline float widen(Brain b) { return std::bit_cast<float>(uint32_t{b.bits} << 16); }
inline Half narrow(float f, Half) {
  const uint32_t all = std::bit_cast<uint32_t>(f), sign = (all >> 16) & 0x8000u;
  const uint32_t b = all & 0x7fffffffu;
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(b) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (b - 0x38000000u + 0xfffu + ((b >> 13) & 1u)) >> 13;
  uint32_t h = b < 0x38800000u ? subnormal : normal;
  h = b >= 0x47800000u ? 0x7c00u : h;
  h = b > 0x7f800000u ? 0x7e00u : h;
  return {static_cast<uint16_t>(sign | h)};
}
inline Brain narrow(float f, Brain) {
  const uint32_t b = std::bit_cast<uint32_t>(f);
  const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  const uint32_t quiet = (b >> 16) | 0x40u;
  return {static_cast<uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}

template <typename T>
inline constexpr bool is_narrow = std::is_same_v<T, Half> || std::is_same_v<T, Brain>;
template <typename T>
inline constexpr bool is_complex =
    std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;

// Wide enough and unsigned: overflow wraps instead of being undefined.
template <typename T>
using Wrapping = std::conditional_t<
    (sizeof(T) < 4), uint32_t,
    std::make_unsigned_t<std::conditional_t<std::is_integral_v<T>, T, uint32_t>>>;

template <Op op, typename T>
inline T apply(T a, T b) {
  constexpr bool integral = std::is_integral_v<T> && !std::is_same_v<T, bool>;
  if constexpr (is_narrow<T>) {
    return narrow(apply<op, float>(widen(a), widen(b)), T{});
  } else if constexpr (op == Op::sum) {
    if constexpr (integral) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  } else if constexpr (op == Op::prod) {
    if constexpr (integral) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else if constexpr (is_complex<T>) {
      return T(a.real() * b.real() - a.imag() * b.imag(),
               a.real() * b.imag() + a.imag() * b.real());
    } else {
      return a * b;
    }
  } else if constexpr (op == Op::min) {
    return a < b || a != a ? a : b;
  } else if constexpr (op == Op::max) {
    return a > b || a != a ? a : b;
  } else if constexpr (op == Op::land) {
    return static_cast<T>((a != T{}) & (b != T{}));
  } else if constexpr (op == Op::lor) {
    return static_cast<T>((a != T{}) | (b != T{}));
  } else if constexpr (op == Op::lxor) {
    return static_cast<T>((a != T{}) != (b != T{}));
  } else if constexpr (op == Op::band) {
    return static_cast<T>(a & b);
  } else if constexpr (op == Op::bor) {
    return static_cast<T>(a | b);
  } else {
    return static_cast<T>(a ^ b);
  }
}

template <Op op, typename T>
void run(void* dst, const void* left, const void* right, size_t count) {
  T* d = static_cast<T*>(dst);
  const T *l = static_cast<const T*>(left), *r = static_cast<const T*>(right);
  NOSTALL_SAME_INDEX_ONLY
  for (size_t i = 0; i < count; ++i) d[i] = apply<op, T>(l[i], r[i]);
}

template <Op op, typename T>
void run_to_two(void* dst, void* also, const void* left, const void* right, size_t count) {
  T *d = static_cast<T*>(dst), *e = static_cast<T*>(also);
  const T *l = static_cast<const T*>(left), *r = static_cast<const T*>(right);
  NOSTALL_SAME_INDEX_ONLY
  for (size_t i = 0; i < count; ++i) d[i] = e[i] = apply<op, T>(l[i], r[i]);
}

template <Op op, typename T>
constexpr Kernels kKernels{run<op, T>, run_to_two<op, T>};

// Booleans are bytes that are 0 or not; results are 0 or 1.
template <Op op>
constexpr Kernels bool_kernels() {
  constexpr Op logical = op == Op::sum || op == Op::max || op == Op::bor     ? Op::lor
                         : op == Op::prod || op == Op::min || op == Op::band ? Op::land
                         : op == Op::bxor                                    ? Op::lxor
                                                                             : op;
  return kKernels<logical, uint8_t>;
}

template <typename T>
Kernels kernels_of(Op op) {
  switch (op) {
    case Op::sum:
      return kKernels<Op::sum, T>;
    case Op::prod:
      return kKernels<Op::prod, T>;
    default:
      break;
  }
  if constexpr (!is_complex<T>) {
    switch (op) {
      case Op::min:
        return kKernels<Op::min, T>;
      case Op::max:
        return kKernels<Op::max, T>;
      case Op::land:
        return kKernels<Op::land, T>;
      case Op::lor:
        return kKernels<Op::lor, T>;
      case Op::lxor:
        return kKernels<Op::lxor, T>;
      default:
        break;
    }
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case Op::band:
        return kKernels<Op::band, T>;
      case Op::bor:
        return kKernels<Op::bor, T>;
      case Op::bxor:
        return kKernels<Op::bxor, T>;
      default:
        break;
    }
  }
  return {};
}

inline Kernels kernels_of_bool(Op op) {
  switch (op) {
    case Op::sum:
      return bool_kernels<Op::sum>();
    case Op::prod:
      return bool_kernels<Op::prod>();
    case Op::min:
      return bool_kernels<Op::min>();
    case Op::max:
      return bool_kernels<Op::max>();
    case Op::land:
      return bool_kernels<Op::land>();
    case Op::lor:
      return bool_kernels<Op::lor>();
    case Op::lxor:
      return bool_kernels<Op::lxor>();
    case Op::band:
      return bool_kernels<Op::band>();
    case Op::bor:
      return bool_kernels<Op::bor>();
    case Op::bxor:
      break;
  }
  return bool_kernels<Op::bxor>();
}

inline Kernels kernels_in_this_set(Op op, DataType type) {
  switch (type) {
    case DataType::float16:
      return kernels_of<Half>(op);
    case DataType::bfloat16:
      return kernels_of<Brain>(op);
    case DataType::float32:
      return kernels_of<float>(op);
    case DataType::float64:
      return kernels_of<double>(op);
    case DataType::int8:
      return kernels_of<int8_t>(op);
    case DataType::int16:
      return kernels_of<int16_t>(op);
    case DataType::int32:
      return kernels_of<int32_t>(op);
    case DataType::int64:
      return kernels_of<int64_t>(op);
    case DataType::uint8:
      return kernels_of<uint8_t>(op);
    case DataType::uint16:
      return kernels_of<uint16_t>(op);
    case DataType::uint32:
      return kernels_of<uint32_t>(op);
    case DataType::uint64:
      return kernels_of<uint64_t>(op);
    case DataType::boolean:
      return kernels_of_bool(op);
    case DataType::complex64:
      return kernels_of<std::complex<float>>(op);
    case DataType::complex128:
      break;
  }
  return kernels_of<std::complex<double>>(op);
}

}  // namespace
}  // namespace nostall::collective
