// The arithmetic of the difference wire, once, in the way of mix_math.h.
//
// A message of n numbers: their codes, zeros up to a multiple of four bytes, then a bf16 scale for
// each block of kScaleBlock numbers. A code is a whole number in -top..top, in two's complement; of
// two that share a byte the first has the low half.
//
// code * scale has at most 15 significant bits, so that product is exact.
#pragma once

#include "mix_math.h"

namespace oldsgd {

constexpr int kScaleBlock = 64;
constexpr uint16_t kInfinite = 0x7f80;  // the scale of a block with an inf or a NaN

OLDSGD_HD constexpr int64_t code_bytes(int64_t n, int bits) { return (n * bits + 31) / 32 * 4; }

#ifdef __CUDA_ARCH__
OLDSGD_HD float divide(float a, float b) { return __fdiv_rn(a, b); }
OLDSGD_HD double divide(double a, double b) { return __ddiv_rn(a, b); }
#else
template <class A>
OLDSGD_HD A divide(A a, A b) {
  return a / b;
}
#endif

// Magnitudes are compared as whole numbers: the order of the numbers, with NaN as the largest.
template <class A>
struct Whole;
template <>
struct Whole<float> {
  using I = int32_t;
  static constexpr I kMagnitude = 0x7fffffff;
  static constexpr float kMagic = 0x1.8p23f;
};
template <>
struct Whole<double> {
  using I = int64_t;
  static constexpr I kMagnitude = 0x7fffffffffffffff;
  static constexpr double kMagic = 0x1.8p52;
};

template <class A, class I, class V>
OLDSGD_HD I magnitude(V v) {
  return bit_cast<I>(v) & Whole<A>::kMagnitude;
}

// The scale is largest / top, to nearest: within 2^-9, so that the largest still rounds to top. Too
// small for 1 / scale to be finite: 0, and the difference waits.
template <int bits, class A>
OLDSGD_HD bf16 scale_of(A largest) {
  const float exact = static_cast<float>(divide(largest, A(bits == 8 ? 127 : 7)));
  const uint32_t h = float_to_bf16_bits<uint32_t>(exact) & 0x7fffu;
  return {static_cast<uint16_t>(h >= kInfinite ? kInfinite : h < 0x0080u ? 0u : h)};
}

template <class A>
OLDSGD_HD A inverse_of(bf16 scale) {
  return scale.bits == 0 ? A(0) : divide(A(1), widen<A>(scale));
}

// The code of a difference, as a number. Adding the magic number rounds to the nearest whole one,
// ties to even; never -0.
template <class A>
OLDSGD_HD A raised_level(A delta, A inverse, A magic) {
  return add(mul(delta, inverse), magic);
}
template <class A>
OLDSGD_HD A level_of(A delta, A inverse, A magic) {
  return sub(raised_level(delta, inverse, magic), magic);
}

template <class A>
OLDSGD_HD A add_level(A z, A level, A scale) {
  return add(z, mul(level, scale));
}

// One number's code, k counted from the message's beginning.
template <int bits>
OLDSGD_HD int code_at(const uint8_t* message, int64_t k) {
  if constexpr (bits == 8) {
    return static_cast<int8_t>(message[k]);
  } else {
    const int half = message[k / 2] >> (k % 2 * 4) & 15;
    return (half ^ 8) - 8;
  }
}

}  // namespace oldsgd
