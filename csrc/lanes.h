// kLanes numbers at a time, in as many vectors of the instruction set as that takes. For the files
// that are compiled once for each instruction set: nothing here has external linkage.
#pragma once

#include "kernels.h"
#include "mix_math.h"

#if defined(OLDSGD_AVX512)
#include "vec_avx512.h"
#define OLDSGD_ISA(name) name##_avx512
#elif defined(OLDSGD_AVX2)
#include "vec_avx2.h"
#define OLDSGD_ISA(name) name##_avx2
#else
#include "vec_portable.h"
#define OLDSGD_ISA(name) name##_portable
#endif

namespace oldsgd {
namespace {

template <class A>
struct Lanes;  // kLanes accumulators, in as many vectors as that takes
template <>
struct Lanes<float> {
  static constexpr int count = kLanes / kFloats;
  VF v[count];
};
template <>
struct Lanes<double> {
  static constexpr int count = 2 * kLanes / kFloats;
  VD v[count];
};

#define OLDSGD_EACH(u, A) _Pragma("GCC unroll 8") for (int u = 0; u < Lanes<A>::count; ++u)

template <class A, class S>
OLDSGD_HD Lanes<A> load_lanes(const S* p) {
  Lanes<A> r;
  if constexpr (sizeof(A) == 8 && sizeof(S) < 8) {
    OLDSGD_EACH(u, float) split(load(p + u * kFloats), r.v[2 * u], r.v[2 * u + 1]);
  } else {
    OLDSGD_EACH(u, A) r.v[u] = load(p + u * (kLanes / Lanes<A>::count));
  }
  return r;
}

template <class A, class S>
OLDSGD_HD void store_lanes(S* p, const Lanes<A>& s, bool past_cache) {
  if constexpr (sizeof(A) == 8 && sizeof(S) < 8) {
    OLDSGD_EACH(u, float) {
      const VF v = join(s.v[2 * u], s.v[2 * u + 1]);
      past_cache ? stream(p + u * kFloats, v) : store(p + u * kFloats, v);
    }
  } else {
    constexpr int width = kLanes / Lanes<A>::count;
    OLDSGD_EACH(u, A) past_cache ? stream(p + u * width, s.v[u]) : store(p + u * width, s.v[u]);
  }
}

OLDSGD_HD void add_double(Lanes<double>& sum, const Lanes<double>& e) {
  OLDSGD_EACH(u, double) sum.v[u] = sum.v[u] + e.v[u];
}
OLDSGD_HD void add_double(Lanes<double>& sum, const Lanes<float>& e) {
  OLDSGD_EACH(u, float) {
    VD low, high;
    split(e.v[u], low, high);
    sum.v[2 * u] = sum.v[2 * u] + low;
    sum.v[2 * u + 1] = sum.v[2 * u + 1] + high;
  }
}

}  // namespace
}  // namespace oldsgd
