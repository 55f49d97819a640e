// The arithmetic of mixing, once: for scalars on host and device, and for GCC/Clang vector types.
//
// Every product is rounded before it is added (the build turns contraction off, the device uses the
// _rn intrinsics), and sums run in one fixed order. So every build gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#define OLDSGD_HD __host__ __device__ __forceinline__
#else
#define OLDSGD_HD inline __attribute__((always_inline))
#endif

namespace oldsgd {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

#ifdef __CUDA_ARCH__
OLDSGD_HD float mul(float a, float b) { return __fmul_rn(a, b); }
OLDSGD_HD float add(float a, float b) { return __fadd_rn(a, b); }
OLDSGD_HD float sub(float a, float b) { return __fsub_rn(a, b); }
OLDSGD_HD double mul(double a, double b) { return __dmul_rn(a, b); }
OLDSGD_HD double add(double a, double b) { return __dadd_rn(a, b); }
OLDSGD_HD double sub(double a, double b) { return __dsub_rn(a, b); }
#else
template <class A>
OLDSGD_HD A mul(A a, A b) {
  return a * b;
}
template <class A>
OLDSGD_HD A add(A a, A b) {
  return a + b;
}
template <class A>
OLDSGD_HD A sub(A a, A b) {
  return a - b;
}
#endif

// Gradient form: s = w_0 y_i, then s + w_j y_j for each j, then s - alpha acc.
// Delta form: s = 0, then s + w_j (y_j - y_i) for each j, then x + s.
template <class A>
OLDSGD_HD A weigh(A s, A w, A v) {
  return add(s, mul(w, v));
}
template <class A>
OLDSGD_HD A descend(A s, A alpha, A acc) {
  return sub(s, mul(alpha, acc));
}

// The weighted squared distance of one element: e = 0, then e + w_j (y_j - y_i)^2 for each j.
template <class A>
OLDSGD_HD A weigh_square(A e, A w, A delta) {
  return add(e, mul(w, mul(delta, delta)));
}

template <class To, class From>
OLDSGD_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Conversions, branch-free so that they hold for a scalar (F = float, U = uint32_t) and for a
// vector of them. Rounding is to nearest, ties to even; NaN stays a (quiet) NaN.

template <class F, class U>
OLDSGD_HD F bf16_bits_to_float(U h) {
  return bit_cast<F>(h << 16);
}

template <class U, class F>
OLDSGD_HD U float_to_bf16_bits(F f) {
  U u = bit_cast<U>(f);
  U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  U quiet = (u >> 16) | 0x40u;
  return (u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
}

template <class F, class U>
OLDSGD_HD F f16_bits_to_float(U h) {
  U magnitude = (h & 0x7fffu) << 13;
  // 2^112 shifts the exponent bias from 15 to 127 and normalises subnormals, both exactly.
  U u = bit_cast<U>(F(bit_cast<F>(magnitude) * 0x1p112f));
  u = magnitude >= 0x0f800000u ? (magnitude | 0x7f800000u) : u;
  return bit_cast<F>(u | ((h & 0x8000u) << 16));
}

template <class U, class F>
OLDSGD_HD U float_to_f16_bits(F f) {
  U u = bit_cast<U>(f);
  U sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  // The bias falls from 127 to 15; a carry out of the mantissa moves the exponent, as it should.
  U normal = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
  // Adding 0.5 lines the subnormal's last bit up with the last bit of a float.
  U subnormal = bit_cast<U>(F(bit_cast<F>(u) + 0.5f)) - 0x3f000000u;
  U special = u > 0x7f800000u ? (0x7e00u | ((u >> 13) & 0x3ffu)) : (u & 0u) + 0x7c00u;
  U h = u < 0x38800000u ? subnormal : normal;
  h = u >= 0x477ff000u ? special : h;
  return h | sign;
}

// Load to the accumulation type A (double for a double model, else float), round back on store.
// double reaches a 16-bit type through float, as torch does.

template <class A>
OLDSGD_HD A widen(double v) {
  return static_cast<A>(v);
}
template <class A>
OLDSGD_HD A widen(float v) {
  return static_cast<A>(v);
}
template <class A>
OLDSGD_HD A widen(bf16 v) {
  return static_cast<A>(bf16_bits_to_float<float>(static_cast<uint32_t>(v.bits)));
}
template <class A>
OLDSGD_HD A widen(f16 v) {
#ifdef __CUDA_ARCH__
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
  return static_cast<A>(f);
#else
  return static_cast<A>(f16_bits_to_float<float>(static_cast<uint32_t>(v.bits)));
#endif
}

template <class T, class A>
OLDSGD_HD T narrow(A a) {
  if constexpr (std::is_same<T, bf16>::value) {
    return {static_cast<uint16_t>(float_to_bf16_bits<uint32_t>(static_cast<float>(a)))};
  } else if constexpr (std::is_same<T, f16>::value) {
    const float f = static_cast<float>(a);
#ifdef __CUDA_ARCH__
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return {h};
#else
    return {static_cast<uint16_t>(float_to_f16_bits<uint32_t>(f))};
#endif
  } else {
    return static_cast<T>(a);
  }
}

}  // namespace oldsgd
