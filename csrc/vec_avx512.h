// Sixteen floats: AVX-512F. Not its bf16 instructions, which flush subnormals.
#pragma once

#include <immintrin.h>

#include "codes.h"
#include "mix_math.h"

namespace oldsgd {
namespace {

constexpr int kFloats = 16;
typedef __m512 VF;
typedef __m512d VD;
typedef uint32_t VU __attribute__((vector_size(64)));
typedef int32_t VI __attribute__((vector_size(64)));
typedef int64_t VL __attribute__((vector_size(64)));

inline VF splat(float a) { return _mm512_set1_ps(a); }
inline VD splat(double a) { return _mm512_set1_pd(a); }

inline __m256i load_bits(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline VF load(const float* p) { return _mm512_loadu_ps(p); }
inline VD load(const double* p) { return _mm512_loadu_pd(p); }
inline VF load(const bf16* p) {
  return bf16_bits_to_float<VF>(bit_cast<VU>(_mm512_cvtepu16_epi32(load_bits(p))));
}
inline VF load(const f16* p) { return _mm512_cvtph_ps(load_bits(p)); }

inline __m256i bits(const bf16*, VF v) {
  return _mm512_cvtepi32_epi16(bit_cast<__m512i>(float_to_bf16_bits<VU>(v)));
}
inline __m256i bits(const f16*, VF v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }

inline void store(float* p, VF v) { _mm512_storeu_ps(p, v); }
inline void store(double* p, VD v) { _mm512_storeu_pd(p, v); }
template <class H>
inline void store(H* p, VF v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits(p, v));
}

inline void stream(float* p, VF v) { _mm512_stream_ps(p, v); }
inline void stream(double* p, VD v) { _mm512_stream_pd(p, v); }
template <class H>
inline void stream(H* p, VF v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bits(p, v));
}
inline void fence() { _mm_sfence(); }

inline void split(VF v, VD& low, VD& high) {
  low = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
  high = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
}
inline VF join(VD low, VD high) {
  const __m512d both = _mm512_castpd256_pd512(_mm256_castps_pd(_mm512_cvtpd_ps(low)));
  return _mm512_castpd_ps(_mm512_insertf64x4(both, _mm256_castps_pd(_mm512_cvtpd_ps(high)), 1));
}

// What a store to a 16-bit type leaves of v.
inline VF rounded(const bf16*, VF v) { return bf16_bits_to_float<VF>(float_to_bf16_bits<VU>(v)); }
inline VF rounded(const f16* p, VF v) { return _mm512_cvtph_ps(bits(p, v)); }

// Codes as numbers, the u-th vector of them; and from the low bytes of kLanes words.
inline VF numbers(Codes c, int) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(c)); }
inline Codes low_bytes(const VF* words) {
  return _mm512_cvtepi32_epi8(_mm512_castps_si512(words[0]));
}

}  // namespace
}  // namespace oldsgd
