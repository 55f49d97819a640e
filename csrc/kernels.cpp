// The CPU loops of fused_mix, once; compiled for each instruction set with its own flags. Nothing
// with external linkage comes from here but kernels_<isa>(), so that no other file can get AVX
// code.
#include "kernels.h"

#include "lanes.h"
#include "mix_math.h"

namespace oldsgd {
namespace {

// What a mix has besides models and snapshots, known before its loop: testing for it inside the
// loop costs up to 8%. bare: nothing. round: what an agent asks for at the end of a round, the next
// snapshot in place of the old one and, in the gradient form, a sum of gradients that is emptied.
enum class Extras { bare, round, any };

// One mix of T models over W wires; the form, the wish for a distance and a common degree (0: any)
// are fixed at compile time.
template <class T, class W, bool delta, bool distance, int fixed_degree>
struct Loop {
  using A = typename std::conditional<std::is_same<T, double>::value, double, float>::type;

  T* out;
  const W* y_self;
  const void* const* neighbours;
  const A* weights;
  int64_t degree;
  A w_self, alpha;
  T* acc;
  W* y_next;
  bool zero_acc, stream_out, stream_next;
  // Of a fixed degree, so that they stay in registers: no store can be thought to change them.
  const W* near[fixed_degree + 1];
  A near_weights[fixed_degree + 1];

  OLDSGD_HD const W* neighbour(int64_t j) const {
    return fixed_degree ? near[j] : static_cast<const W*>(neighbours[j]);
  }
  OLDSGD_HD A weight(int64_t j) const { return fixed_degree ? near_weights[j] : weights[j]; }
  Extras extras() const {
    if (!acc && !y_next) return Extras::bare;
    const bool round = y_next && !stream_next && (delta || (acc && zero_acc));
    return round ? Extras::round : Extras::any;
  }

  template <Extras extras>
  OLDSGD_HD void lanes(int64_t i, Lanes<double>& sum) const {
    constexpr bool any = extras == Extras::any, round = extras == Extras::round;
    const Lanes<A> y = load_lanes<A>(y_self + i);
    Lanes<A> s, e;
    OLDSGD_EACH(u, A) {
      s.v[u] = delta ? splat(A(0)) : mul(splat(w_self), y.v[u]);
      e.v[u] = splat(A(0));
    }
    const int64_t count = fixed_degree ? fixed_degree : degree;
    for (int64_t j = 0; j < count; ++j) {
      const Lanes<A> y_j = load_lanes<A>(neighbour(j) + i);
      const auto w = splat(weight(j));
      OLDSGD_EACH(u, A) {
        const auto v = delta ? sub(y_j.v[u], y.v[u]) : y_j.v[u];
        s.v[u] = weigh(s.v[u], w, v);
        if constexpr (distance) e.v[u] = weigh_square(e.v[u], w, v);
      }
    }
    if constexpr (delta) {
      const Lanes<A> x = load_lanes<A>(out + i);
      OLDSGD_EACH(u, A) s.v[u] = add(x.v[u], s.v[u]);
    } else if (round || (any && acc)) {
      const Lanes<A> g = load_lanes<A>(acc + i);
      OLDSGD_EACH(u, A) s.v[u] = descend(s.v[u], splat(alpha), g.v[u]);
    }
    store_lanes(out + i, s, !delta && stream_out);
    if (round || (any && y_next)) store_lanes(y_next + i, s, any && stream_next);
    if (!delta && (round || (any && zero_acc))) memset(acc + i, 0, kLanes * sizeof(T));
    if constexpr (distance) add_double(sum, e);
  }

  // The same for one element; returns its distance.
  OLDSGD_HD A one(int64_t i) const {
    const A y = widen<A>(y_self[i]);
    A s = delta ? A(0) : mul(w_self, y);
    A e = 0;
    for (int64_t j = 0; j < degree; ++j) {
      const A y_j = widen<A>(static_cast<const W*>(neighbours[j])[i]);
      const A v = delta ? sub(y_j, y) : y_j;
      s = weigh(s, weights[j], v);
      if constexpr (distance) e = weigh_square(e, weights[j], v);
    }
    if constexpr (delta) {
      s = add(widen<A>(out[i]), s);
    } else if (acc) {
      s = descend(s, alpha, widen<A>(acc[i]));
    }
    out[i] = narrow<T>(s);
    if (y_next) y_next[i] = narrow<W>(s);
    if (!delta && zero_acc) memset(acc + i, 0, sizeof(T));
    return e;
  }

  template <Extras extras>
  int64_t all_lanes(int64_t i, int64_t end, Lanes<double>& sum) const {
    const Loop local = *this;
    for (; i + kLanes <= end; i += kLanes) local.template lanes<extras>(i, sum);
    return i;
  }

  void block(int64_t i, int64_t end, double* partial) const {
    Lanes<double> sum;
    OLDSGD_EACH(u, double) sum.v[u] = splat(0.0);
    switch (extras()) {
      case Extras::bare:
        i = all_lanes<Extras::bare>(i, end, sum);
        break;
      case Extras::round:
        i = all_lanes<Extras::round>(i, end, sum);
        break;
      case Extras::any:
        i = all_lanes<Extras::any>(i, end, sum);
    }
    double lane[kLanes];
    if constexpr (distance) memcpy(lane, &sum, sizeof lane);
    for (int k = 0; i < end; ++i, ++k) {
      const A e = one(i);
      if constexpr (distance) lane[k] += static_cast<double>(e);
    }
    if constexpr (distance) {
      double total = 0;
      for (double l : lane) total += l;
      *partial = total;
    }
  }
};

template <class T, class W, bool delta, bool distance, int fixed_degree>
void run_degree(const Work& j, int64_t begin, int64_t end, double* partials) {
  using L = Loop<T, W, delta, distance, fixed_degree>;
  using A = typename L::A;
  L loop{static_cast<T*>(j.out),
         static_cast<const W*>(j.y_self),
         j.neighbours,
         static_cast<const A*>(j.weights),
         j.degree,
         static_cast<A>(j.w_self),
         static_cast<A>(j.alpha),
         static_cast<T*>(j.acc),
         static_cast<W*>(j.y_next),
         j.zero_acc,
         j.stream_out,
         j.stream_next,
         {},
         {}};
  for (int k = 0; k < fixed_degree; ++k) {
    loop.near[k] = static_cast<const W*>(j.neighbours[k]);
    loop.near_weights[k] = loop.weights[k];
  }
  if (!distance) {
    loop.block(begin, end, nullptr);
  } else {
    for (int64_t b = begin; b < end; b += kBlock)
      loop.block(b, b + kBlock < end ? b + kBlock : end, partials + b / kBlock);
  }
  if (j.stream_out || j.stream_next) fence();
}

template <class T, class W, bool delta, bool distance>
void run(const Work& j, int64_t begin, int64_t end, double* partials) {
  switch (j.degree) {  // of a one-peer graph, a ring, a torus
    case 2:
      return run_degree<T, W, delta, distance, 2>(j, begin, end, partials);
#ifndef OLDSGD_FEWER_DEGREES  // sanitizers take long to compile, and these are the same loop
    case 1:
      return run_degree<T, W, delta, distance, 1>(j, begin, end, partials);
    case 4:
      return run_degree<T, W, delta, distance, 4>(j, begin, end, partials);
#endif
    default:
      return run_degree<T, W, delta, distance, 0>(j, begin, end, partials);
  }
}

void copy(char* dst, const char* src, int64_t bytes) {
  int64_t i = 0;
  const auto* from = reinterpret_cast<const float*>(src);
  auto* to = reinterpret_cast<float*>(dst);
  if (reinterpret_cast<uintptr_t>(dst) % 64 == 0) {
    for (; i + kLanes <= bytes / 4; i += kLanes)
      store_lanes(to + i, load_lanes<float>(from + i), true);
    fence();
  }
  memcpy(to + i, from + i, static_cast<size_t>(bytes - 4 * i));
}

template <class T, class W>
void fill(Kernels& k, Dtype model, Dtype wire) {
  Kernel* forms = k.mix[static_cast<int>(model)][static_cast<int>(wire)];
  forms[0] = run<T, W, false, false>;
  forms[1] = run<T, W, true, false>;
  forms[2] = run<T, W, true, true>;
}

Kernels make() {
  Kernels k{};
  fill<double, double>(k, Dtype::f64, Dtype::f64);
  fill<double, float>(k, Dtype::f64, Dtype::f32);
  fill<double, bf16>(k, Dtype::f64, Dtype::bf16);
  fill<double, f16>(k, Dtype::f64, Dtype::f16);
  fill<float, float>(k, Dtype::f32, Dtype::f32);
  fill<float, bf16>(k, Dtype::f32, Dtype::bf16);
  fill<float, f16>(k, Dtype::f32, Dtype::f16);
  fill<bf16, bf16>(k, Dtype::bf16, Dtype::bf16);
  fill<f16, f16>(k, Dtype::f16, Dtype::f16);
  k.stream_copy = copy;
  k.narrow = &OLDSGD_ISA(narrow_kernels)();
  return k;
}

}  // namespace

const Kernels& OLDSGD_ISA(kernels)() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace oldsgd
