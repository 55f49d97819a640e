// The CUDA side of narrow.h. Memory traffic: each input once, each output once, models in 128-bit
// words. A thread holds a few numbers, and neighbouring threads of a warp a block of the message.
#include "cuda_common.h"
#include "narrow.h"
#include "narrow_math.h"

namespace oldsgd {
namespace {

constexpr unsigned kWholeWarp = 0xffffffffu;
enum class Pass { decode, encode, mix, mix_distance };

// ---------------------------------------------------------------------------------- kernels

// A kernel's only argument, by value, as in mix.cu.
template <class T, class A>
struct NarrowArgs {
  int64_t n, degree, scales;  // scales: where they begin in a message
  T *x, *z;
  uint8_t* next;
  double* distance;
  Scratch* scratch;
  const uint64_t* table;  // past the fixed degree: copies, messages, then weights as double
  bool wide;              // every pointer is aligned to 16 bytes
  T* copies[kMaxFixedDegree];
  const uint8_t* messages[kMaxFixedDegree];
  A weights[kMaxFixedDegree];
};

// The numbers [i, i + K) of one thread, of which `count` exist.
template <class T, class A, int bits>
struct Part {
  static constexpr int K = 16 / int(sizeof(T));  // a word of the model
  static constexpr int kLanesOfBlock = kScaleBlock / K;
  static_assert(kLanesOfBlock <= kWarp, "a warp holds whole blocks");
  static constexpr int kCodeBytes = K * bits / 8;
  using Codes = Word<kCodeBytes>;

  int64_t i, scales;
  int count;
  bool wide;

  __device__ __forceinline__ Part(const NarrowArgs<T, A>& m, int64_t at)
      : i(at), scales(m.scales), wide(m.wide) {
    const int64_t left = m.n - at;
    count = left >= K ? K : left > 0 ? static_cast<int>(left) : 0;
    wide = wide && count == K;
  }

  __device__ __forceinline__ void load(A (&v)[K], const T* p) const {
    Group<T, K> group;
    if (wide) {
      group.load(p + i);
    } else {
#pragma unroll
      for (int k = 0; k < K; ++k) group.v[k] = k < count ? p[i + k] : narrow<T>(A(0));
    }
#pragma unroll
    for (int k = 0; k < K; ++k) v[k] = widen<A>(group.v[k]);
  }

  // Leaves in v what was stored.
  __device__ __forceinline__ void store(A (&v)[K], T* p) const {
    Group<T, K> group;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      group.v[k] = narrow<T>(v[k]);
      v[k] = widen<A>(group.v[k]);
    }
    if (wide) {
      group.store(p + i);
    } else {
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (k < count) p[i + k] = group.v[k];
    }
  }

  __device__ __forceinline__ A load_scale(const uint8_t* message) const {
    if (count == 0) return A(0);
    const uint8_t* p = message + scales + i / kScaleBlock * 2;
    return widen<A>(bf16{static_cast<uint16_t>(p[0] | p[1] << 8)});
  }
  __device__ __forceinline__ void store_scale(uint8_t* message, bf16 scale) const {
    if (count == 0 || i % kScaleBlock != 0) return;
    uint8_t* p = message + scales + i / kScaleBlock * 2;
    p[0] = static_cast<uint8_t>(scale.bits);
    p[1] = static_cast<uint8_t>(scale.bits >> 8);
  }

  __device__ __forceinline__ Codes load_codes(const uint8_t* message) const {
    const int64_t at = i * bits / 8;
    if (wide) return *reinterpret_cast<const Codes*>(message + at);
    Codes word = 0;
#pragma unroll
    for (int b = 0; b < kCodeBytes; ++b)
      if (at + b < scales)
        word |= static_cast<Codes>(static_cast<Codes>(message[at + b]) << (8 * b));
    return word;
  }
  // The zeros between the last code and the scales too.
  __device__ __forceinline__ void store_codes(uint8_t* message, Codes word) const {
    const int64_t at = i * bits / 8;
    if (wide) {
      *reinterpret_cast<Codes*>(message + at) = word;
    } else {
#pragma unroll
      for (int b = 0; b < kCodeBytes; ++b)
        if (at + b < scales) message[at + b] = static_cast<uint8_t>(word >> (8 * b));
    }
  }
  __device__ __forceinline__ static A level_in(Codes word, int k) {
    if constexpr (bits == 8) {
      return static_cast<A>(static_cast<int8_t>(static_cast<uint8_t>(word >> (8 * k))));
    } else {
      return static_cast<A>((static_cast<int>(word >> (4 * k) & 15) ^ 8) - 8);
    }
  }

  // z += message, leaving in v what was stored.
  __device__ __forceinline__ void decode(A (&v)[K], T* z, const uint8_t* message) const {
    const A scale = load_scale(message);
    const Codes word = load_codes(message);
    load(v, z);
#pragma unroll
    for (int k = 0; k < K; ++k) v[k] = add_level(v[k], level_in(word, k), scale);
    store(v, z);
  }

  // next = Q(x - y), and z = y + next. The whole warp must call this.
  __device__ __forceinline__ void encode(const A (&x)[K], A (&y)[K], T* z, uint8_t* next) const {
    using I = typename Whole<A>::I;
    I largest = 0;
    A delta[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      delta[k] = sub(x[k], y[k]);
      const I m = k < count ? magnitude<A, I>(delta[k]) : I(0);
      largest = m > largest ? m : largest;
    }
#pragma unroll
    for (int half = kLanesOfBlock / 2; half > 0; half /= 2) {
      const I other = __shfl_xor_sync(kWholeWarp, largest, half);
      largest = other > largest ? other : largest;
    }
    const bf16 scale = scale_of<bits>(bit_cast<A>(largest));
    const A step = widen<A>(scale), inverse = inverse_of<A>(scale);
    const bool usable = scale.bits != kInfinite;
    Codes word = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const bool exists = usable && k < count;
      const A level = exists ? level_of(delta[k], inverse, A(Whole<A>::kMagic)) : A(0);
      const Codes code = static_cast<Codes>(static_cast<int>(level) & (bits == 8 ? 255 : 15));
      word |= static_cast<Codes>(code << (bits * k));
      y[k] = add_level(y[k], level, step);
    }
    store(y, z);
    store_codes(next, word);
    store_scale(next, scale);
  }
};

// Returns the distance of the part.
template <class T, class A, int bits, bool distance>
__device__ __forceinline__ double mix_part(const NarrowArgs<T, A>& m,
                                           const Part<T, A, bits>& part) {
  constexpr int K = Part<T, A, bits>::K;
  A x[K], y[K], s[K], e[K], c[K];
  part.load(y, m.z);
  part.load(x, m.x);  // early: nothing waits for it until the neighbours are read
#pragma unroll
  for (int k = 0; k < K; ++k) s[k] = e[k] = A(0);
  const bool fixed = m.table == nullptr;
  for (int64_t j = 0; j < m.degree; ++j) {
    T* copy = fixed ? m.copies[j] : reinterpret_cast<T*>(m.table[j]);
    const uint8_t* message =
        fixed ? m.messages[j] : reinterpret_cast<const uint8_t*>(m.table[m.degree + j]);
    const A w =
        fixed ? m.weights[j] : static_cast<A>(bit_cast<double>(m.table[2 * m.degree + 1 + j]));
    part.decode(c, copy, message);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const A v = sub(c[k], y[k]);
      s[k] = weigh(s[k], w, v);
      if constexpr (distance) e[k] = weigh_square(e[k], w, v);
    }
  }
#pragma unroll
  for (int k = 0; k < K; ++k) x[k] = add(x[k], s[k]);
  part.store(x, m.x);
  if (m.next) part.encode(x, y, m.z, m.next);
  double total = 0;
  if constexpr (distance) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (k < part.count) total = add(total, static_cast<double>(e[k]));
  }
  return total;
}

template <class T, class A, int bits, Pass pass>
__global__ void __launch_bounds__(kThreads, sizeof(A) == 8 ? 2 : 3)
    narrow_kernel(const __grid_constant__ NarrowArgs<T, A> m) {
  using P = Part<T, A, bits>;
  const int lane = threadIdx.x % kWarp;
  const int64_t stride = int64_t(gridDim.x) * kThreads * P::K;
  double total = 0;
  // `first` is the warp's, so that all its threads do the same number of steps.
  for (int64_t first = (int64_t(blockIdx.x) * kThreads + threadIdx.x - lane) * P::K; first < m.n;
       first += stride) {
    const P part(m, first + lane * P::K);
    if constexpr (pass == Pass::decode) {
      A v[P::K];
      part.decode(v, m.z, m.messages[0]);
    } else if constexpr (pass == Pass::encode) {
      A x[P::K], y[P::K];
      part.load(x, m.x);
      part.load(y, m.z);
      part.encode(x, y, m.z, m.next);
    } else {
      total = add(total, mix_part < T, A, bits, pass == Pass::mix_distance > (m, part));
    }
  }
  if constexpr (pass == Pass::mix_distance) grid_sum(total, m.scratch, m.distance);
}

// -------------------------------------------------------------------------------- launchers

template <class T>
using Accumulator = typename std::conditional<std::is_same<T, double>::value, double, float>::type;

template <class T, int bits, Pass pass>
void launch(NarrowArgs<T, Accumulator<T>>& args, cudaStream_t stream) {
  using A = Accumulator<T>;
  if (args.n == 0 && pass != Pass::mix_distance) return;
  args.scales = code_bytes(args.n, bits);
  args.wide = args.wide && aligned(args.x) && aligned(args.z) && aligned(args.next);
  void* parameters[] = {&args};
  const int64_t threads = (args.n + Part<T, A, bits>::K - 1) / Part<T, A, bits>::K;
  const auto kernel = narrow_kernel<T, A, bits, pass>;
  check(cudaLaunchKernel(kernel, grid_for(threads, kernel), dim3(kThreads), parameters, 0, stream),
        "launching the kernel of the difference wire");
}

template <class T, int bits>
void launch_mix(const Narrow& m, cudaStream_t stream, const void* table, void* scratch) {
  NarrowArgs<T, Accumulator<T>> args{};
  args.n = m.n;
  args.degree = m.degree();
  args.x = static_cast<T*>(m.x);
  args.z = static_cast<T*>(m.z_self);
  args.next = static_cast<uint8_t*>(m.next);
  args.distance = m.distance;
  args.scratch = static_cast<Scratch*>(scratch);
  args.wide = true;
  for (const void* z : m.copies) args.wide = args.wide && aligned(z);
  for (const void* message : m.messages) args.wide = args.wide && aligned(message);
  if (m.degree() > kMaxFixedDegree) {
    args.table = static_cast<const uint64_t*>(table);
  } else {
    for (int64_t j = 0; j < m.degree(); ++j) {
      args.copies[j] = static_cast<T*>(m.copies[j]);
      args.messages[j] = static_cast<const uint8_t*>(m.messages[j]);
      args.weights[j] = static_cast<Accumulator<T>>(m.weights[j + 1]);
    }
  }
  m.distance ? launch<T, bits, Pass::mix_distance>(args, stream)
             : launch<T, bits, Pass::mix>(args, stream);
}

template <class T, int bits>
void launch_rows(const NarrowRows& m, cudaStream_t stream) {
  for (int64_t row = 0; row < m.rows; ++row) {
    NarrowArgs<T, Accumulator<T>> args{};
    args.n = m.d;
    args.z = static_cast<T*>(m.z) + row * m.z_stride;
    uint8_t* message = static_cast<uint8_t*>(m.message) + row * m.message_stride;
    args.wide = aligned(message);
    if (m.x) {
      args.x = static_cast<T*>(const_cast<void*>(m.x)) + row * m.x_stride;  // it is only read
      args.next = message;
      launch<T, bits, Pass::encode>(args, stream);
    } else {
      args.messages[0] = message;
      launch<T, bits, Pass::decode>(args, stream);
    }
  }
}

// f(T(), whole number of bits)
template <class F>
void by_type(Dtype model, int bits, const F& f) {
  if (bits != 8 && bits != 4) throw std::invalid_argument("a code has 8 or 4 bits");
  const auto with = [&](auto zero) {
    bits == 8 ? f(zero, std::integral_constant<int, 8>())
              : f(zero, std::integral_constant<int, 4>());
  };
  switch (model) {
    case Dtype::f64:
      return with(double());
    case Dtype::f32:
      return with(float());
    case Dtype::bf16:
      return with(bf16());
    case Dtype::f16:
      return with(f16());
  }
}

}  // namespace

void narrow_cuda(const Narrow& m, void* stream, const void* table, void* scratch) {
  if (m.degree() > kMaxFixedDegree && !table) throw std::invalid_argument("the table is missing");
  if (m.distance && !scratch) throw std::invalid_argument("the scratch memory is missing");
  by_type(m.model, m.bits, [&](auto zero, auto bits) {
    launch_mix<decltype(zero), bits.value>(m, static_cast<cudaStream_t>(stream), table, scratch);
  });
}

void narrow_rows_cuda(const NarrowRows& m, void* stream) {
  by_type(m.model, m.bits, [&](auto zero, auto bits) {
    launch_rows<decltype(zero), bits.value>(m, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace oldsgd
