// Eight floats: AVX2 with F16C.
#pragma once

#include <immintrin.h>

#include "codes.h"
#include "mix_math.h"

namespace oldsgd {
namespace {

constexpr int kFloats = 8;
typedef __m256 VF;
typedef __m256d VD;
typedef uint32_t VU __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));
typedef int64_t VL __attribute__((vector_size(32)));

inline VF splat(float a) { return _mm256_set1_ps(a); }
inline VD splat(double a) { return _mm256_set1_pd(a); }

inline __m128i load_bits(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline VF load(const float* p) { return _mm256_loadu_ps(p); }
inline VD load(const double* p) { return _mm256_loadu_pd(p); }
inline VF load(const bf16* p) {
  return bf16_bits_to_float<VF>(bit_cast<VU>(_mm256_cvtepu16_epi32(load_bits(p))));
}
inline VF load(const f16* p) { return _mm256_cvtph_ps(load_bits(p)); }

inline __m128i bits(const bf16*, VF v) {
  const __m256i u = bit_cast<__m256i>(float_to_bf16_bits<VU>(v));
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 0x08));
}
inline __m128i bits(const f16*, VF v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }

inline void store(float* p, VF v) { _mm256_storeu_ps(p, v); }
inline void store(double* p, VD v) { _mm256_storeu_pd(p, v); }
template <class H>
inline void store(H* p, VF v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bits(p, v));
}

inline void stream(float* p, VF v) { _mm256_stream_ps(p, v); }
inline void stream(double* p, VD v) { _mm256_stream_pd(p, v); }
template <class H>
inline void stream(H* p, VF v) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), bits(p, v));
}
inline void fence() { _mm_sfence(); }

inline void split(VF v, VD& low, VD& high) {
  low = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
  high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
}
inline VF join(VD low, VD high) {
  return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low));
}

// Stores results of arithmetic on numbers of p's type, and leaves in v what is stored. The low half
// of a NaN is then zero, so that rounding to bf16 cannot make it a number.
inline void keep(float* p, VF* v) {
  store(p, v[0]);
  store(p + kFloats, v[1]);
}
inline void keep(f16* p, VF* v) {
  for (int u = 0; u < 2; ++u) {
    const __m128i h = bits(p, v[u]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + u * kFloats), h);
    v[u] = _mm256_cvtph_ps(h);
  }
}
inline __m256i rounded_up(VF v) {  // the high halves are what bf16 has
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
}
inline void keep(bf16* p, VF* v) {
  const __m256i a = rounded_up(v[0]), b = rounded_up(v[1]);
  const __m256i h = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(h, 0xd8));
  const __m256i high = _mm256_set1_epi32(-0x10000);
  v[0] = _mm256_castsi256_ps(_mm256_and_si256(a, high));
  v[1] = _mm256_castsi256_ps(_mm256_and_si256(b, high));
}

inline int32_t largest(VI v) {
  const __m256i m = bit_cast<__m256i>(v);
  __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
  h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1));
  return _mm_cvtsi128_si32(h);
}
inline int64_t largest(VL v) {
  int64_t most = v[0];
  for (int k = 1; k < 4; ++k) most = v[k] > most ? v[k] : most;
  return most;
}

// Codes as numbers; and from the low bytes of kLanes words.
template <int bits>
inline void load_numbers(const uint8_t* p, VF* v) {
  for (int u = 0; u < 2; ++u) {
    if constexpr (bits == 8) {
      const __m128i c = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + u * kFloats));
      v[u] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(c));
    } else {  // each code to the top of its word, and down again with its sign
      const __m256i up = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
      int32_t codes;
      memcpy(&codes, p + u * sizeof codes, sizeof codes);
      const __m256i c = _mm256_sllv_epi32(_mm256_set1_epi32(codes), up);
      v[u] = _mm256_cvtepi32_ps(_mm256_srai_epi32(c, 28));
    }
  }
}
inline __m128i low_halves(VF words) {
  const __m256i w = _mm256_and_si256(_mm256_castps_si256(words), _mm256_set1_epi32(0xff));
  return _mm_packs_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}
inline Codes low_bytes(const VF* words) {
  return _mm_packus_epi16(low_halves(words[0]), low_halves(words[1]));
}

}  // namespace
}  // namespace oldsgd
