// Four floats: SSE2 on x86-64, NEON on arm64, whatever the compiler makes of it elsewhere.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "mix_math.h"

namespace oldsgd {
namespace {

constexpr int kFloats = 4;
typedef float VF __attribute__((vector_size(16)));
typedef double VD __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));

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

}  // namespace
}  // namespace oldsgd
