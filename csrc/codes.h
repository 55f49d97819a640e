// Sixteen codes of a message, as bytes.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSSE3__)
#include <tmmintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace oldsgd {
namespace {

#ifdef __SSE2__

typedef __m128i Codes;

template <int bits>
inline Codes load_codes(const uint8_t* p) {
  if constexpr (bits == 8) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  } else {
    const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i both = _mm_unpacklo_epi8(low, _mm_srli_epi16(low, 4));
    const __m128i sign = _mm_set1_epi8(8);
    return _mm_sub_epi8(_mm_xor_si128(_mm_and_si128(both, _mm_set1_epi8(15)), sign), sign);
  }
}

template <int bits>
inline void store_codes(uint8_t* p, Codes c) {
  if constexpr (bits == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), c);
  } else {
#ifdef __SSSE3__
    const __m128i low = _mm_and_si128(c, _mm_set1_epi8(15));
    const __m128i pairs = _mm_maddubs_epi16(low, _mm_set1_epi16(0x1001));  // first + 16 second
#else
    const __m128i first = _mm_and_si128(c, _mm_set1_epi16(0x000f));
    const __m128i second = _mm_and_si128(_mm_srli_epi16(c, 4), _mm_set1_epi16(0x00f0));
    const __m128i pairs = _mm_or_si128(first, second);
#endif
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
  }
}

#else

struct Codes {
  int8_t v[16];
};

template <int bits>
inline Codes load_codes(const uint8_t* p) {
  Codes c;
  if constexpr (bits == 8) {
    memcpy(c.v, p, sizeof c.v);
  } else {
    for (int k = 0; k < 8; ++k) {
      c.v[2 * k] = static_cast<int8_t>(((p[k] & 15) ^ 8) - 8);
      c.v[2 * k + 1] = static_cast<int8_t>(((p[k] >> 4) ^ 8) - 8);
    }
  }
  return c;
}

template <int bits>
inline void store_codes(uint8_t* p, Codes c) {
  if constexpr (bits == 8) {
    memcpy(p, c.v, sizeof c.v);
  } else {
    for (int k = 0; k < 8; ++k)
      p[k] = static_cast<uint8_t>((c.v[2 * k] & 15) | (c.v[2 * k + 1] & 15) << 4);
  }
}

#endif

}  // namespace
}  // namespace oldsgd
