// The CUDA side of mix.h. Memory traffic: each input once, each output once, in 128-bit words.
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
  int64_t n, words;  // elements; groups of kWord of them, 0 where a pointer is not aligned
  int64_t degree;
  T* out;
  const W* y_self;
  T* acc;
  W* y_next;
  double* distance;
  double* scratch;        // one partial per block, then the count of blocks that are done
  const uint64_t* table;  // past the fixed degree: addresses, then weights as double
  A w_self, alpha;
  bool zero_acc;
  const W* neighbours[kMaxFixedDegree];
  A weights[kMaxFixedDegree];
};

// K elements from i on; returns their distance.
template <class T, class W, class A, bool delta, bool distance, int K>
__device__ __forceinline__ double mix_group(const Args<T, W, A>& m, int64_t i) {
  Group<W, K> wire;
  wire.load(m.y_self + i);
  A y[K], s[K], e[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
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
    for (int k = 0; k < K; ++k) {
      const A v = delta ? sub(widen<A>(wire.v[k]), y[k]) : widen<A>(wire.v[k]);
      s[k] = weigh(s[k], w, v);
      if constexpr (distance) e[k] = weigh_square(e[k], w, v);
    }
  }
  Group<T, K> model;
  if constexpr (delta) {
    model.load(m.out + i);
#pragma unroll
    for (int k = 0; k < K; ++k) s[k] = add(widen<A>(model.v[k]), s[k]);
  } else if (m.acc) {
    model.load(m.acc + i);
#pragma unroll
    for (int k = 0; k < K; ++k) s[k] = descend(s[k], m.alpha, widen<A>(model.v[k]));
  }
#pragma unroll
  for (int k = 0; k < K; ++k) model.v[k] = narrow<T>(s[k]);
  model.store(m.out + i);
  if (m.y_next) {
#pragma unroll
    for (int k = 0; k < K; ++k) wire.v[k] = narrow<W>(s[k]);
    wire.store(m.y_next + i);
  }
  if (!delta && m.zero_acc) {
#pragma unroll
    for (int k = 0; k < K; ++k) model.v[k] = narrow<T>(A(0));
    model.store(m.acc + i);
  }
  double total = 0;
  if constexpr (distance) {
#pragma unroll
    for (int k = 0; k < K; ++k) total = add(total, static_cast<double>(e[k]));
  }
  return total;
}

template <class T, class W, class A, bool delta, bool distance>
__global__ void __launch_bounds__(kThreads, sizeof(A) == 8 ? 2 : 4)
    mix_kernel(const __grid_constant__ Args<T, W, A> m) {
  constexpr int kWord = 16 / int(sizeof(W));
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  double total = 0;
  for (int64_t g = first; g < m.words; g += stride)
    total = add(total, mix_group<T, W, A, delta, distance, kWord>(m, g * kWord));
  for (int64_t i = m.words * kWord + first; i < m.n; i += stride)
    total = add(total, mix_group<T, W, A, delta, distance, 1>(m, i));

  if constexpr (distance) {
    grid_sum(total, m.scratch, m.distance);
  }
}

// -------------------------------------------------------------------------------- launchers

template <class T, class W, bool delta, bool distance>
void launch(const Mix& m, cudaStream_t stream, const void* table, void* scratch) {
  using A = typename std::conditional<std::is_same<T, double>::value, double, float>::type;
  constexpr int kWord = 16 / int(sizeof(W));

  Args<T, W, A> args{};
  args.n = m.n;
  args.degree = m.degree();
  args.out = static_cast<T*>(m.out);
  args.y_self = static_cast<const W*>(m.y_self);
  args.acc = static_cast<T*>(m.acc);
  args.y_next = static_cast<W*>(m.y_next);
  args.distance = m.distance;
  args.scratch = static_cast<double*>(scratch);
  args.w_self = static_cast<A>(m.weights[0]);
  args.alpha = static_cast<A>(m.alpha);
  args.zero_acc = m.zero_acc;
  bool wide = aligned(m.out) && aligned(m.y_self) && aligned(m.acc) && aligned(m.y_next);
  for (const void* y_j : m.neighbours) wide = wide && aligned(y_j);
  args.words = wide ? m.n / kWord : 0;
  if (m.degree() > kMaxFixedDegree) {
    args.table = static_cast<const uint64_t*>(table);
  } else {
    for (int64_t j = 0; j < m.degree(); ++j) {
      args.neighbours[j] = static_cast<const W*>(m.neighbours[j]);
      args.weights[j] = static_cast<A>(m.weights[j + 1]);
    }
  }

  const int64_t groups = wide ? args.words + m.n % kWord : m.n;
  void* parameters[] = {&args};
  check(cudaLaunchKernel(mix_kernel<T, W, A, delta, distance>, grid_for(groups), dim3(kThreads),
                         parameters, 0, stream),
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
std::string cuda_archs() { return OLDSGD_ARCHS; }

}  // namespace oldsgd
