// The CUDA side of mix.h. Memory traffic: each input once, each output once, the model in 128-bit
// words and the wire in words of as many elements.
#include "cuda_common.h"

#ifndef OLDSGD_ARCHS
#define OLDSGD_ARCHS ""
#endif

namespace oldsgd {
namespace {

// ---------------------------------------------------------------------------------- kernels

// A kernel's only argument, by value: up to kMaxFixedDegree neighbours need no memory of their own.
template <class T, class W, class A>
struct Args {
  int64_t n, words;  // elements; groups of Shape::kGroup, 0 where a pointer is not aligned
  int64_t degree;
  T* out;
  const W* y_self;
  T* acc;
  W* y_next;
  double* distance;
  Scratch* scratch;
  const uint64_t* table;  // past the fixed degree: addresses, then weights as double
  A w_self, alpha;
  bool zero_acc;
  const W* neighbours[kMaxFixedDegree];
  A weights[kMaxFixedDegree];
};

// How a thread's elements lie: C words of K. A word of the model has 128 bits. Where the wire is
// narrower, C of its words are as long as one of the model's.
template <class T, class W>
struct Shape {
  static constexpr int K = 16 / int(sizeof(T)), C = int(sizeof(T) / sizeof(W));
  static constexpr int kGroup = K * C;
  // A warp takes 32 groups together if their words are spread over it.
  static constexpr int kTogether = C > 1 ? kWarp : 1;

  static __device__ __forceinline__ int64_t first(int64_t g) {
    if constexpr (C == 1) return g * K;
    return g / kWarp * kWarp * kGroup + g % kWarp * K;
  }
};

// C words of K elements from i on; returns their distance.
template <class T, class W, class A, bool delta, bool distance, int K, int C>
__device__ __forceinline__ double mix_group(const Args<T, W, A>& m, int64_t i) {
  constexpr int N = K * C;
  Group<W, K, C> wire;
  Group<T, K, C> model;
  wire.load(m.y_self + i);
  // Early: nothing below waits for it until the neighbours are read.
  if (delta || m.acc) model.load((delta ? m.out : m.acc) + i);
  A y[N], s[N], e[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    y[k] = widen<A>(wire.v[k]);
    s[k] = delta ? A(0) : mul(m.w_self, y[k]);
    e[k] = A(0);
  }
  const bool fixed = m.table == nullptr;
#pragma unroll 2
  for (int64_t j = 0; j < m.degree; ++j) {
    const W* y_j = fixed ? m.neighbours[j] : reinterpret_cast<const W*>(m.table[j]);
    const A w = fixed ? m.weights[j] : static_cast<A>(bit_cast<double>(m.table[m.degree + 1 + j]));
    wire.load(y_j + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const A v = delta ? sub(widen<A>(wire.v[k]), y[k]) : widen<A>(wire.v[k]);
      s[k] = weigh(s[k], w, v);
      if constexpr (distance) e[k] = weigh_square(e[k], w, v);
    }
  }
  if constexpr (delta) {
#pragma unroll
    for (int k = 0; k < N; ++k) s[k] = add(widen<A>(model.v[k]), s[k]);
  } else if (m.acc) {
#pragma unroll
    for (int k = 0; k < N; ++k) s[k] = descend(s[k], m.alpha, widen<A>(model.v[k]));
  }
#pragma unroll
  for (int k = 0; k < N; ++k) model.v[k] = narrow<T>(s[k]);
  model.store(m.out + i);
  if (m.y_next) {
#pragma unroll
    for (int k = 0; k < N; ++k) wire.v[k] = narrow<W>(s[k]);
    wire.store(m.y_next + i);
  }
  if (!delta && m.zero_acc) {
#pragma unroll
    for (int k = 0; k < N; ++k) model.v[k] = narrow<T>(A(0));
    model.store(m.acc + i);
  }
  double total = 0;
  if constexpr (distance) {
#pragma unroll
    for (int k = 0; k < N; ++k) total = add(total, static_cast<double>(e[k]));
  }
  return total;
}

template <class T, class W, class A, bool delta, bool distance>
__global__ void __launch_bounds__(kThreads, sizeof(A) == 8 ? 2 : 4)
    mix_kernel(const __grid_constant__ Args<T, W, A> m) {
  using S = Shape<T, W>;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  double total = 0;
  for (int64_t g = first; g < m.words; g += stride)
    total = add(total, mix_group<T, W, A, delta, distance, S::K, S::C>(m, S::first(g)));
  for (int64_t i = m.words * S::kGroup + first; i < m.n; i += stride)
    total = add(total, mix_group<T, W, A, delta, distance, 1, 1>(m, i));

  if constexpr (distance) {
    grid_sum(total, m.scratch, m.distance);
  }
}

// -------------------------------------------------------------------------------- launchers

template <class T, class W, bool delta, bool distance>
void launch(const Mix& m, cudaStream_t stream, const void* table, void* scratch) {
  using A = typename std::conditional<std::is_same<T, double>::value, double, float>::type;
  using S = Shape<T, W>;

  Args<T, W, A> args{};
  args.n = m.n;
  args.degree = m.degree();
  args.out = static_cast<T*>(m.out);
  args.y_self = static_cast<const W*>(m.y_self);
  args.acc = static_cast<T*>(m.acc);
  args.y_next = static_cast<W*>(m.y_next);
  args.distance = m.distance;
  args.scratch = static_cast<Scratch*>(scratch);
  args.w_self = static_cast<A>(m.weights[0]);
  args.alpha = static_cast<A>(m.alpha);
  args.zero_acc = m.zero_acc;
  bool wide = aligned(m.out) && aligned(m.y_self) && aligned(m.acc) && aligned(m.y_next);
  for (const void* y_j : m.neighbours) wide = wide && aligned(y_j);
  args.words = wide ? m.n / (S::kGroup * S::kTogether) * S::kTogether : 0;
  if (m.degree() > kMaxFixedDegree) {
    args.table = static_cast<const uint64_t*>(table);
  } else {
    for (int64_t j = 0; j < m.degree(); ++j) {
      args.neighbours[j] = static_cast<const W*>(m.neighbours[j]);
      args.weights[j] = static_cast<A>(m.weights[j + 1]);
    }
  }

  const auto kernel = mix_kernel<T, W, A, delta, distance>;
  const int64_t rest = m.n - args.words * S::kGroup;
  const dim3 grid = grid_for(args.words > rest ? args.words : rest, kernel);
  void* parameters[] = {&args};
  check(cudaLaunchKernel(kernel, grid, dim3(kThreads), parameters, 0, stream),
        "launching the mixing kernel");
}

template <class T, class W>
void launch_form(const Mix& m, cudaStream_t stream, const void* table, void* scratch) {
  if (m.form == Form::gradient) {
    if (m.n > 0) launch<T, W, false, false>(m, stream, table, scratch);
  } else if (m.distance) {
    launch<T, W, true, true>(m, stream, table, scratch);
  } else if (m.n > 0) {
    launch<T, W, true, false>(m, stream, table, scratch);
  }
}

template <class T>
void launch_wire(const Mix& m, cudaStream_t stream, const void* table, void* scratch) {
  if constexpr (sizeof(T) == 2) {
    launch_form<T, T>(m, stream, table, scratch);
  } else {
    switch (m.wire) {
      case Dtype::bf16:
        return launch_form<T, bf16>(m, stream, table, scratch);
      case Dtype::f16:
        return launch_form<T, f16>(m, stream, table, scratch);
      case Dtype::f32:
        return launch_form<T, float>(m, stream, table, scratch);
      case Dtype::f64:
        if constexpr (sizeof(T) == 8) return launch_form<T, T>(m, stream, table, scratch);
    }
  }
}

}  // namespace

void mix_cuda(const Mix& m, void* stream_address, const void* table, void* scratch) {
  if (!wire_fits(m.model, m.wire)) throw std::invalid_argument("the wire is wider than the model");
  if (m.degree() > kMaxFixedDegree && !table) throw std::invalid_argument("the table is missing");
  if (m.distance && !scratch) throw std::invalid_argument("the scratch memory is missing");
  const auto stream = static_cast<cudaStream_t>(stream_address);
  switch (m.model) {
    case Dtype::f64:
      return launch_wire<double>(m, stream, table, scratch);
    case Dtype::f32:
      return launch_wire<float>(m, stream, table, scratch);
    case Dtype::bf16:
      return launch_wire<bf16>(m, stream, table, scratch);
    case Dtype::f16:
      return launch_wire<f16>(m, stream, table, scratch);
  }
}

bool cuda_compiled() { return true; }

std::string cuda_refusal() {
  cudaFuncAttributes found;
  const auto kernel = mix_kernel<float, float, float, true, false>;
  const cudaError_t error = cudaFuncGetAttributes(&found, kernel);
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // or the next launch would report it
  return cudaGetErrorString(error);
}

std::string cuda_archs() { return OLDSGD_ARCHS; }

}  // namespace oldsgd
