// The CPU loops of the difference wire, once; compiled for each instruction set as kernels.cpp is.
#include "lanes.h"
#include "narrow_math.h"

namespace oldsgd {
namespace {

static_assert(kBlock % kScaleBlock == 0, "a thread's share ends with a block of the message");
constexpr int kGroups = kScaleBlock / kLanes;
constexpr int kTile =
    16;  // blocks that are mixed, then encoded while they are in the nearest cache

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

// Stores s at p; returns what is left of it there.
template <class A, class T>
OLDSGD_HD Lanes<A> kept(T* p, Lanes<A> s) {
  if constexpr (sizeof(A) == 8) {
    store_lanes(p, s, false);
  } else {
    keep(p, s.v);
  }
  return s;
}

template <int bits, class A>
OLDSGD_HD Lanes<A> load_levels(const uint8_t* codes) {
  Lanes<float> f;
  load_numbers<bits>(codes, f.v);
  if constexpr (sizeof(A) == 4) {
    return f;
  } else {
    Lanes<A> r;
    OLDSGD_EACH(u, float) split(f.v[u], r.v[2 * u], r.v[2 * u + 1]);
    return r;
  }
}

// `raised` are levels plus the magic number: a float's low byte is then its code.
template <int bits, class A>
OLDSGD_HD void store_levels(uint8_t* codes, const Lanes<A>& raised) {
  if constexpr (sizeof(A) == 4) {
    store_codes<bits>(codes, low_bytes(raised.v));
  } else {
    VF words[Lanes<float>::count];
    const auto magic = splat(Whole<A>::kMagic);
    OLDSGD_EACH(u, float)
    words[u] = add(join(sub(raised.v[2 * u], magic), sub(raised.v[2 * u + 1], magic)),
                   splat(Whole<float>::kMagic));
    store_codes<bits>(codes, low_bytes(words));
  }
}

// What lies between the two halves of an encoding, in the nearest cache: x - z of each block, its
// largest magnitude and, where z has to be widened, z.
template <class T, class A>
struct Tile {
  static constexpr bool kWidens = sizeof(T) < sizeof(A);
  using V = typename WholeLanes<A>::V;

  A delta[kTile][kScaleBlock];
  A z[kWidens ? kTile : 1][kScaleBlock];
  A largest[kTile];

  OLDSGD_HD void take(int b, int k, const Lanes<A>& x, const Lanes<A>& y, V& most) {
    Lanes<A> d;
    OLDSGD_EACH(u, A) {
      d.v[u] = sub(x.v[u], y.v[u]);
      const V m = magnitude<A, V>(d.v[u]);
      most = m > most ? m : most;
    }
    store_lanes(delta[b] + k, d, false);
    if constexpr (kWidens) store_lanes(z[b] + k, y, false);
  }
  OLDSGD_HD Lanes<A> y(int b, int k, const T* own) const {
    if constexpr (kWidens) {
      return load_lanes<A>(z[b] + k);
    } else {
      return load_lanes<A>(own + k);
    }
  }
};

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
    return kept(z + i, c);
  }

  // Where the result is to be encoded, the tile's block b takes what that needs: x and z are
  // in registers here.
  template <bool encodes>
  OLDSGD_HD void mix_block(int64_t i, Lanes<double>& sum, Tile<T, A>& tile, int b) const {
    BlockLanes<A> y, s, e;
    for (int g = 0; g < kGroups; ++g) {
      y[g] = load_lanes<A>(z + i + g * kLanes);
      OLDSGD_EACH(u, A) s[g].v[u] = e[g].v[u] = splat(A(0));
    }
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
    typename Tile<T, A>::V most = {};
    for (int g = 0; g < kGroups; ++g) {
      const Lanes<A> old = load_lanes<A>(x + i + g * kLanes);
      OLDSGD_EACH(u, A) s[g].v[u] = add(old.v[u], s[g].v[u]);
      s[g] = kept(x + i + g * kLanes, s[g]);
      if constexpr (encodes) tile.take(b, g * kLanes, s[g], y[g], most);
      if constexpr (distance) add_double(sum, e[g]);
    }
    if constexpr (encodes) tile.largest[b] = bit_cast<A>(largest(most));
  }

  OLDSGD_HD void subtract_block(int64_t i, Tile<T, A>& tile, int b) const {
    typename Tile<T, A>::V most = {};
    for (int k = 0; k < kScaleBlock; k += kLanes)
      tile.take(b, k, load_lanes<A>(x + i + k), load_lanes<A>(z + i + k), most);
    tile.largest[b] = bit_cast<A>(largest(most));
  }

  // The codes of a block that has this scale.
  OLDSGD_HD void encode_block(int64_t i, const Tile<T, A>& tile, int b, A scale, A one_by) const {
    const auto step = splat(scale), inverse = splat(one_by), magic = splat(Whole<A>::kMagic);
    for (int k = 0; k < kScaleBlock; k += kLanes) {
      const Lanes<A> change = load_lanes<A>(tile.delta[b] + k), y = tile.y(b, k, z + i);
      Lanes<A> raised, z_new;
      OLDSGD_EACH(u, A) {
        raised.v[u] = raised_level(change.v[u], inverse, magic);
        z_new.v[u] = add_level(y.v[u], sub(raised.v[u], magic), step);
      }
      kept(z + i + k, z_new);
      store_levels<bits>(next + (i + k) * bits / 8, raised);
    }
  }

  // All scales of a tile come first: a scale takes two divisions, one after the other, and those of
  // many blocks run beside each other.
  OLDSGD_HD void encode_tile(int64_t i, int count, const Tile<T, A>& tile) const {
    A step[kTile], inverse[kTile];
    bf16 scale[kTile];
    for (int b = 0; b < count; ++b) {
      scale[b] = scale_of<bits>(tile.largest[b]);
      step[b] = widen<A>(scale[b]);
      inverse[b] = inverse_of<A>(scale[b]);
    }
    memcpy(next + scales + i / kScaleBlock * sizeof *scale, scale, count * sizeof *scale);
    for (int b = 0; b < count; ++b, i += kScaleBlock) {
      if (scale[b].bits == kInfinite) {
        encode_few(i, i + kScaleBlock);
      } else {
        encode_block(i, tile, b, step[b], inverse[b]);
      }
    }
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
    Tile<T, A> tile;
    while (i + kScaleBlock <= end) {
      const int64_t left = (end - i) / kScaleBlock;
      const int count = static_cast<int>(left < kTile ? left : kTile);
      for (int b = 0; b < count; ++b) {
        if constexpr (mixes) {
          local.template mix_block<encodes>(i + b * kScaleBlock, sum, tile, b);
        } else {
          local.subtract_block(i + b * kScaleBlock, tile, b);
        }
      }
      if constexpr (encodes) local.encode_tile(i, count, tile);
      i += count * kScaleBlock;
    }
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
