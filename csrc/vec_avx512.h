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

// Stores results of arithmetic on numbers of p's type, and leaves in v what is stored. The low half
// of a NaN is then zero, so that rounding to bf16 cannot make it a number.
inline void keep(float* p, VF* v) { store(p, *v); }
inline void keep(f16* p, VF* v) {
  const __m256i h = bits(p, *v);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
  *v = _mm512_cvtph_ps(h);
}
inline void keep(bf16* p, VF* v) {
  const __m512i u = _mm512_castps_si512(*v);
  const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
  __m512i r = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
  r = _mm512_mask_add_epi32(r, odd, r, _mm512_set1_epi32(1));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
  *v = _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32(-0x10000)));
}

inline int32_t largest(VI v) { return _mm512_reduce_max_epi32(bit_cast<__m512i>(v)); }
inline int64_t largest(VL v) {
  int64_t most = v[0];
  for (int k = 1; k < 8; ++k) most = v[k] > most ? v[k] : most;
  return most;
}

// Codes as numbers; and from the low bytes of kLanes words.
template <int bits>
inline void load_numbers(const uint8_t* p, VF* v) {
  if constexpr (bits == 8) {
    *v = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_codes<8>(p)));
  } else {  // the table is asked for the low four bits of each word
    const __m512i half =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i word = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const VF table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    int64_t codes;
    memcpy(&codes, p, sizeof codes);
    const __m512i c = _mm512_permutexvar_epi32(word, _mm512_set1_epi64(codes));
    *v = _mm512_permutexvar_ps(_mm512_srlv_epi32(c, half), table);
  }
}
inline Codes low_bytes(const VF* words) {
  return _mm512_cvtepi32_epi8(_mm512_castps_si512(words[0]));
}

}  // namespace
}  // namespace oldsgd
