// Four floats: SSE2 on x86-64, NEON on arm64, whatever the compiler makes of it elsewhere.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "codes.h"
#include "mix_math.h"

namespace oldsgd {
namespace {

constexpr int kFloats = 4;
typedef float VF __attribute__((vector_size(16)));
typedef double VD __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef int64_t VL __attribute__((vector_size(16)));

inline VF splat(float a) { return VF{a, a, a, a}; }
inline VD splat(double a) { return VD{a, a}; }

inline VF load(const float* p) {
  VF v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline VD load(const double* p) {
  VD v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline VU load_bits(const uint16_t* p) { return VU{p[0], p[1], p[2], p[3]}; }
inline VF load(const bf16* p) { return bf16_bits_to_float<VF>(load_bits(&p->bits)); }
inline VF load(const f16* p) { return f16_bits_to_float<VF>(load_bits(&p->bits)); }

inline void store_bits(uint16_t* p, VU u) {
  for (int k = 0; k < kFloats; ++k) p[k] = static_cast<uint16_t>(u[k]);
}
inline void store(float* p, VF v) { memcpy(p, &v, sizeof v); }
inline void store(double* p, VD v) { memcpy(p, &v, sizeof v); }
inline void store(bf16* p, VF v) { store_bits(&p->bits, float_to_bf16_bits<VU>(v)); }
inline void store(f16* p, VF v) { store_bits(&p->bits, float_to_f16_bits<VU>(v)); }

#ifdef __SSE2__
inline void stream(float* p, VF v) { _mm_stream_ps(p, v); }
inline void stream(double* p, VD v) { _mm_stream_pd(p, v); }
inline void fence() { _mm_sfence(); }
#else
inline void stream(float* p, VF v) { store(p, v); }
inline void stream(double* p, VD v) { store(p, v); }
inline void fence() {}
#endif
inline void stream(bf16* p, VF v) { store(p, v); }
inline void stream(f16* p, VF v) { store(p, v); }

inline void split(VF v, VD& low, VD& high) {
  low = VD{v[0], v[1]};
  high = VD{v[2], v[3]};
}
inline VF join(VD low, VD high) {
  return VF{static_cast<float>(low[0]), static_cast<float>(low[1]), static_cast<float>(high[0]),
            static_cast<float>(high[1])};
}

// Stores results of arithmetic on numbers of p's type, and leaves in v what is stored.
inline VF rounded(const float*, VF v) { return v; }
inline VF rounded(const bf16*, VF v) { return bf16_bits_to_float<VF>(float_to_bf16_bits<VU>(v)); }
inline VF rounded(const f16*, VF v) { return f16_bits_to_float<VF>(float_to_f16_bits<VU>(v)); }
template <class T>
inline void keep(T* p, VF* v) {
  for (int u = 0; u < 4; ++u) {
    store(p + u * kFloats, v[u]);
    v[u] = rounded(p, v[u]);
  }
}

template <class V>
inline auto largest(V v) {
  auto most = v[0];
  for (size_t k = 1; k < sizeof v / sizeof most; ++k) most = v[k] > most ? v[k] : most;
  return most;
}

// Codes as numbers, the u-th vector of them, or all; and from the low bytes of kLanes words.
#ifdef __SSE2__
inline VF numbers(Codes c, int u) {
  const __m128i zero = _mm_setzero_si128();
  const __m128i pairs = u < 2 ? _mm_unpacklo_epi8(zero, c) : _mm_unpackhi_epi8(zero, c);
  const __m128i high = u % 2 ? _mm_unpackhi_epi16(zero, pairs) : _mm_unpacklo_epi16(zero, pairs);
  return _mm_cvtepi32_ps(_mm_srai_epi32(high, 24));
}
inline __m128i low_byte(VF words) {
  return _mm_and_si128(_mm_castps_si128(words), _mm_set1_epi32(0xff));
}
inline Codes low_bytes(const VF* words) {
  return _mm_packus_epi16(_mm_packs_epi32(low_byte(words[0]), low_byte(words[1])),
                          _mm_packs_epi32(low_byte(words[2]), low_byte(words[3])));
}
#else
inline VF numbers(Codes c, int u) {
  VF v;
  for (int k = 0; k < kFloats; ++k) v[k] = c.v[kFloats * u + k];
  return v;
}
inline Codes low_bytes(const VF* words) {
  Codes c;
  for (int k = 0; k < 16; ++k)
    c.v[k] = static_cast<int8_t>(bit_cast<VU>(words[k / kFloats])[k % kFloats] & 0xffu);
  return c;
}
#endif

template <int bits>
inline void load_numbers(const uint8_t* p, VF* v) {
  const Codes c = load_codes<bits>(p);
  for (int u = 0; u < 4; ++u) v[u] = numbers(c, u);
}

}  // namespace
}  // namespace oldsgd
