// What the CUDA kernels share: words of 128 bits, sums over blocks, the size of a grid.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "mix.h"
#include "mix_math.h"

namespace oldsgd {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

// ---------------------------------------------------------------------------------- kernels

// A word of so many bytes.
template <int bytes>
using Word = typename std::conditional<
    bytes == 16, uint4,
    typename std::conditional<
        bytes == 8, uint64_t,
        typename std::conditional<
            bytes == 4, uint32_t,
            typename std::conditional<bytes == 2, uint16_t, uint8_t>::type>::type>::type>::type;

// C words of K consecutive elements each. The words of a thread lie a warp apart, so those that the
// warp touches together are neighbours in memory. They are marked as streaming: no element is
// touched twice. One element alone (K = C = 1) needs no alignment.
template <class S, int K, int C = 1>
struct Group {
  S v[K * C];
  static constexpr int kApart = kWarp * K;  // elements from word to word
  static constexpr int kBytes = K * int(sizeof(S));

  __device__ __forceinline__ void load(const S* p) {
    if constexpr (K == 1) {
      v[0] = *p;
    } else {
      Word<kBytes> word[C];
#pragma unroll
      for (int c = 0; c < C; ++c)
        word[c] = __ldcs(reinterpret_cast<const Word<kBytes>*>(p + c * kApart));
      memcpy(v, word, sizeof v);
    }
  }
  __device__ __forceinline__ void store(S* p) const {
    if constexpr (K == 1) {
      *p = v[0];
    } else {
      Word<kBytes> word[C];
      memcpy(word, v, sizeof v);
#pragma unroll
      for (int c = 0; c < C; ++c) __stcs(reinterpret_cast<Word<kBytes>*>(p + c * kApart), word[c]);
    }
  }
};

// What the blocks of a kernel tell each other: a sum each, and how many are done. Zero at first.
struct Scratch {
  double partials[kMostBlocks];
  unsigned done;
};
static_assert(sizeof(Scratch) <= kCudaScratch * sizeof(double), "mix.h promises so much");

// The sum over a block, in a fixed order; valid in thread 0. Ends with all threads past their
// reads.
__device__ __forceinline__ double block_sum(double v) {
  __shared__ double part[kThreads];
  part[threadIdx.x] = v;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] = add(part[threadIdx.x], part[threadIdx.x + half]);
    __syncthreads();
  }
  const double sum = part[0];
  __syncthreads();
  return sum;
}

// *distance = the sum of every thread's `total`. The last block to finish adds up the partials: no
// second kernel, no atomic sum, so the result repeats bit for bit on the same device. It leaves the
// scratch memory as it found it, so nobody needs to clear that between two kernels of a stream.
__device__ __forceinline__ void grid_sum(double total, Scratch* scratch, double* distance) {
  __shared__ bool last;
  const double sum = block_sum(total);
  if (threadIdx.x == 0) {
    scratch->partials[blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(&scratch->done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  double mine = 0;
  const volatile double* partials = scratch->partials;  // written by other blocks of this kernel
  for (unsigned b = threadIdx.x; b < gridDim.x; b += kThreads) mine = add(mine, partials[b]);
  const double all = block_sum(mine);
  if (threadIdx.x == 0) {
    *distance = all;
    scratch->done = 0;
  }
}

// -------------------------------------------------------------------------------- launchers

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Blocks for this many threads' worth of work: as many as the device can hold at once, not more.
template <class Kernel>
dim3 grid_for(int64_t threads, Kernel kernel) {
  int device = 0, sms = 0, on_sm = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "the SM count");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_sm, kernel, kThreads, 0), "occupancy");
  int64_t grid = (threads + kThreads - 1) / kThreads;
  const int64_t most = int64_t(sms) * (on_sm > 0 ? on_sm : 1);
  grid = grid < most ? grid : most;
  grid = grid < kMostBlocks ? grid : kMostBlocks;
  return dim3(static_cast<unsigned>(grid > 0 ? grid : 1));
}

}  // namespace
}  // namespace oldsgd
