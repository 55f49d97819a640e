// The CPU loops of the difference wire, once; compiled for each instruction set as kernels.cpp is.
#include "lanes.h"
#include "narrow_math.h"

namespace oldsgd {
namespace {

static_assert(kBlock % kScaleBlock == 0, "a thread's share ends with a block of the message");
constexpr int kGroups = kScaleBlock / kLanes;

template <class A>
struct WholeLanes;  // a vector of whole numbers, as wide as one of A
template <>
struct WholeLanes<float> {
  typedef VI V;
};
template <>
struct WholeLanes<double> {
  typedef VL V;
};

template <class A>
using BlockLanes = Lanes<A>[kGroups];  // the numbers that share a scale

// What is left of the lanes when they are stored as T.
template <class T, class A>
OLDSGD_HD Lanes<A> as_stored(Lanes<A> s) {
  if constexpr (sizeof(T) == 2)
    OLDSGD_EACH(u, A) s.v[u] = rounded(static_cast<T*>(nullptr), s.v[u]);
  return s;
}

template <int bits, class A>
OLDSGD_HD Lanes<A> load_levels(const uint8_t* codes) {
  const Codes c = load_codes<bits>(codes);
  Lanes<A> r;
  OLDSGD_EACH(u, float) {
    if constexpr (sizeof(A) == 8) {
      split(numbers(c, u), r.v[2 * u], r.v[2 * u + 1]);
    } else {
      r.v[u] = numbers(c, u);
    }
  }
  return r;
}

template <int bits, class A>
OLDSGD_HD void store_levels(uint8_t* codes, const Lanes<A>& levels) {
  VF words[Lanes<float>::count];  // whose low bytes are the codes
  OLDSGD_EACH(u, float) {
    if constexpr (sizeof(A) == 8) {
      words[u] = join(levels.v[2 * u], levels.v[2 * u + 1]);
    } else {
      words[u] = levels.v[u];
    }
    words[u] = add(words[u], splat(Whole<float>::kMagic));
  }
  store_codes<bits>(codes, low_bytes(words));
}

template <class A>
OLDSGD_HD A largest_of(const BlockLanes<A>& delta) {
  using I = typename Whole<A>::I;
  using V = typename WholeLanes<A>::V;
  constexpr int width = sizeof(V) / sizeof(I);
  V most = {};
  for (int g = 0; g < kGroups; ++g) OLDSGD_EACH(u, A) {
      const V m = magnitude<A, V>(delta[g].v[u]);
      most = m > most ? m : most;
    }
  I each[width];
  memcpy(each, &most, sizeof each);
  for (int half = width / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) each[k] = each[k] > each[k + half] ? each[k] : each[k + half];
  return bit_cast<A>(each[0]);
}

template <class T, int bits, bool distance>
struct NarrowLoop {
  using A = typename std::conditional<std::is_same<T, double>::value, double, float>::type;

  T *x, *z;
  void* const* copies;
  const void* const* messages;
  const A* weights;
  int64_t degree;
  uint8_t* next;
  int64_t scales;

  OLDSGD_HD T* copy(int64_t j) const { return static_cast<T*>(copies[j]); }
  OLDSGD_HD const uint8_t* message(int64_t j) const {
    return static_cast<const uint8_t*>(messages[j]);
  }
  OLDSGD_HD A scale_at(const uint8_t* message, int64_t i) const {
    bf16 scale;
    memcpy(&scale, message + scales + i / kScaleBlock * sizeof scale, sizeof scale);
    return widen<A>(scale);
  }

  // z[i:i+kLanes] += the message; returns what is stored.
  template <class V>
  OLDSGD_HD static Lanes<A> decode(T* z, const uint8_t* codes, int64_t i, V scale) {
    Lanes<A> c = load_lanes<A>(z + i);
    const Lanes<A> levels = load_levels<bits, A>(codes + i * bits / 8);
    OLDSGD_EACH(u, A) c.v[u] = add_level(c.v[u], levels.v[u], scale);
    store_lanes(z + i, c, false);
    return as_stored<T>(c);
  }

  OLDSGD_HD void mix_block(int64_t i, const BlockLanes<A>& y, BlockLanes<A>& x_new,
                           Lanes<double>& sum) const {
    BlockLanes<A> s, e;
    for (int g = 0; g < kGroups; ++g) OLDSGD_EACH(u, A) s[g].v[u] = e[g].v[u] = splat(A(0));
    for (int64_t j = 0; j < degree; ++j) {
      const auto scale = splat(scale_at(message(j), i)), w = splat(weights[j]);
      for (int g = 0; g < kGroups; ++g) {
        const Lanes<A> c = decode(copy(j), message(j), i + g * kLanes, scale);
        OLDSGD_EACH(u, A) {
          const auto v = sub(c.v[u], y[g].v[u]);
          s[g].v[u] = weigh(s[g].v[u], w, v);
          if constexpr (distance) e[g].v[u] = weigh_square(e[g].v[u], w, v);
        }
      }
    }
    for (int g = 0; g < kGroups; ++g) {
      const Lanes<A> old = load_lanes<A>(x + i + g * kLanes);
      OLDSGD_EACH(u, A) s[g].v[u] = add(old.v[u], s[g].v[u]);
      store_lanes(x + i + g * kLanes, s[g], false);
      x_new[g] = as_stored<T>(s[g]);
      if constexpr (distance) add_double(sum, e[g]);
    }
  }

  OLDSGD_HD void encode_block(int64_t i, const BlockLanes<A>& y, BlockLanes<A>& delta) const {
    for (int g = 0; g < kGroups; ++g)
      OLDSGD_EACH(u, A) delta[g].v[u] = sub(delta[g].v[u], y[g].v[u]);
    const bf16 scale = scale_of<bits>(largest_of<A>(delta));
    if (scale.bits == kInfinite) return encode_few(i, i + kScaleBlock);
    memcpy(next + scales + i / kScaleBlock * sizeof scale, &scale, sizeof scale);
    const auto step = splat(widen<A>(scale)), inverse = splat(inverse_of<A>(scale));
    const auto magic = splat(Whole<A>::kMagic);
    for (int g = 0; g < kGroups; ++g) {
      Lanes<A> level, z_new;
      OLDSGD_EACH(u, A) {
        level.v[u] = level_of(delta[g].v[u], inverse, magic);
        z_new.v[u] = add_level(y[g].v[u], level.v[u], step);
      }
      store_lanes(z + i + g * kLanes, z_new, false);
      store_levels<bits>(next + (i + g * kLanes) * bits / 8, level);
    }
  }

  template <bool mixes, bool encodes>
  OLDSGD_HD void block(int64_t i, Lanes<double>& sum) const {
    BlockLanes<A> y, x_new;
    for (int g = 0; g < kGroups; ++g) y[g] = load_lanes<A>(z + i + g * kLanes);
    if constexpr (mixes) {
      mix_block(i, y, x_new, sum);
    } else {
      for (int g = 0; g < kGroups; ++g) x_new[g] = load_lanes<A>(x + i + g * kLanes);
    }
    if constexpr (encodes) encode_block(i, y, x_new);
  }

  // The same for a block that is short or not finite, number by number.

  OLDSGD_HD static T decoded(T z, const uint8_t* codes, int64_t k, A scale) {
    return narrow<T>(add_level(widen<A>(z), static_cast<A>(code_at<bits>(codes, k)), scale));
  }

  void mix_few(int64_t i, int64_t end, double* lane) const {
    for (int64_t k = i; k < end; ++k) {
      const A y = widen<A>(z[k]);
      A s = 0, e = 0;
      for (int64_t j = 0; j < degree; ++j) {
        T& c = copy(j)[k];
        c = decoded(c, message(j), k, scale_at(message(j), i));
        const A v = sub(widen<A>(c), y);
        s = weigh(s, weights[j], v);
        if constexpr (distance) e = weigh_square(e, weights[j], v);
      }
      x[k] = narrow<T>(add(widen<A>(x[k]), s));
      if constexpr (distance) lane[(k - i) % kLanes] += static_cast<double>(e);
    }
  }

  void encode_few(int64_t i, int64_t end) const {
    using I = typename Whole<A>::I;
    I largest = 0;
    for (int64_t k = i; k < end; ++k) {
      const I m = magnitude<A, I>(sub(widen<A>(x[k]), widen<A>(z[k])));
      largest = m > largest ? m : largest;
    }
    const bf16 scale = scale_of<bits>(bit_cast<A>(largest));
    const A step = widen<A>(scale), inverse = inverse_of<A>(scale);
    memcpy(next + scales + i / kScaleBlock * sizeof scale, &scale, sizeof scale);
    memset(next + i * bits / 8, 0, code_bytes(end - i, bits));
    for (int64_t k = i; k < end; ++k) {
      const A delta = sub(widen<A>(x[k]), widen<A>(z[k]));
      const bool usable = scale.bits != kInfinite;
      const A level = usable ? level_of(delta, inverse, A(Whole<A>::kMagic)) : A(0);
      z[k] = narrow<T>(add_level(widen<A>(z[k]), level, step));
      const int code = static_cast<int>(level);
      next[k * bits / 8] |= static_cast<uint8_t>(bits == 8 ? code : (code & 15) << (k % 2 * 4));
    }
  }

  template <bool mixes, bool encodes>
  void all(int64_t i, int64_t end, double* partial) const {
    const NarrowLoop local = *this;
    Lanes<double> sum;
    OLDSGD_EACH(u, double) sum.v[u] = splat(0.0);
    for (; i + kScaleBlock <= end; i += kScaleBlock) local.template block<mixes, encodes>(i, sum);
    double lane[kLanes];
    memcpy(lane, &sum, sizeof lane);
    if (i < end) {
      if constexpr (mixes) mix_few(i, end, lane);
      if constexpr (encodes) encode_few(i, end);
    }
    if constexpr (distance) {
      double total = 0;
      for (double l : lane) total += l;
      *partial = total;
    }
  }

  void all_decoded(int64_t i, int64_t end) const {
    T* const z = copy(0);
    const uint8_t* const from = message(0);
    for (; i + kScaleBlock <= end; i += kScaleBlock) {
      const auto scale = splat(scale_at(from, i));
      for (int g = 0; g < kGroups; ++g) decode(z, from, i + g * kLanes, scale);
    }
    for (int64_t k = i; k < end; ++k) z[k] = decoded(z[k], from, k, scale_at(from, i));
  }
};

template <class T, int bits, NarrowForm form>
void run(const NarrowWork& j, int64_t begin, int64_t end, double* partials) {
  constexpr bool distance = form == NarrowForm::mix_distance || form == NarrowForm::round_distance;
  constexpr bool encodes = form != NarrowForm::mix && form != NarrowForm::mix_distance;
  constexpr bool mixes = form != NarrowForm::encode;
  using L = NarrowLoop<T, bits, distance>;
  const L loop{static_cast<T*>(j.x),
               static_cast<T*>(j.z),
               j.copies,
               j.messages,
               static_cast<const typename L::A*>(j.weights),
               j.degree,
               static_cast<uint8_t*>(j.next),
               j.scales};
  if constexpr (form == NarrowForm::decode) {
    loop.all_decoded(begin, end);
  } else if constexpr (!distance) {
    loop.template all<mixes, encodes>(begin, end, nullptr);
  } else {
    for (int64_t b = begin; b < end; b += kBlock)
      loop.template all<mixes, encodes>(b, b + kBlock < end ? b + kBlock : end,
                                        partials + b / kBlock);
  }
}

template <class T, int bits>
void fill(NarrowKernel* forms) {
  forms[0] = run<T, bits, NarrowForm::decode>;
  forms[1] = run<T, bits, NarrowForm::encode>;
  forms[2] = run<T, bits, NarrowForm::mix>;
  forms[3] = run<T, bits, NarrowForm::mix_distance>;
  forms[4] = run<T, bits, NarrowForm::round>;
  forms[5] = run<T, bits, NarrowForm::round_distance>;
}

template <class T>
void fill(NarrowKernels& k, Dtype model) {
  auto* widths = k.run[static_cast<int>(model)];
  fill<T, 8>(widths[0]);
  fill<T, 4>(widths[1]);
}

NarrowKernels make() {
  NarrowKernels k{};
  fill<double>(k, Dtype::f64);
  fill<float>(k, Dtype::f32);
  fill<bf16>(k, Dtype::bf16);
  fill<f16>(k, Dtype::f16);
  return k;
}

}  // namespace

const NarrowKernels& OLDSGD_ISA(narrow_kernels)() {
  static const NarrowKernels kernels = make();
  return kernels;
}

}  // namespace oldsgd
