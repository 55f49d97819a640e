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

// What a store to a 16-bit type leaves of v.
inline VF rounded(const bf16*, VF v) { return bf16_bits_to_float<VF>(float_to_bf16_bits<VU>(v)); }
inline VF rounded(const f16* p, VF v) { return _mm256_cvtph_ps(bits(p, v)); }

// Codes as numbers, the u-th vector of them; and from the low bytes of kLanes words.
inline VF numbers(Codes c, int u) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(u ? _mm_srli_si128(c, 8) : c));
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
