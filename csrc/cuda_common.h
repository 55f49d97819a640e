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
constexpr int kBlocksPerSm = 8;

// ---------------------------------------------------------------------------------- kernels

// K consecutive elements, moved as 128-bit words where K of them fill some. The words are marked as
// streaming: no element is touched twice.
template <class S, int K>
struct Group {
  S v[K];
  static constexpr int kWords = K * int(sizeof(S)) / 16;

  __device__ __forceinline__ void load(const S* p) {
    if constexpr (kWords == 0) {
      v[0] = *p;
    } else {
      uint4 word[kWords];
#pragma unroll
      for (int k = 0; k < kWords; ++k) word[k] = __ldcs(reinterpret_cast<const uint4*>(p) + k);
      memcpy(v, word, sizeof v);
    }
  }
  __device__ __forceinline__ void store(S* p) const {
    if constexpr (kWords == 0) {
      *p = v[0];
    } else {
      uint4 word[kWords];
      memcpy(word, v, sizeof v);
#pragma unroll
      for (int k = 0; k < kWords; ++k) __stcs(reinterpret_cast<uint4*>(p) + k, word[k]);
    }
  }
};

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
// second kernel, no atomic sum, so the result repeats bit for bit on the same device. `scratch`:
// one partial per block, then the count of blocks that are done.
__device__ __forceinline__ void grid_sum(double total, double* scratch, double* distance) {
  __shared__ bool last;
  const double sum = block_sum(total);
  if (threadIdx.x == 0) {
    scratch[blockIdx.x] = sum;
    __threadfence();
    auto* done = reinterpret_cast<unsigned*>(scratch + kCudaScratch - 1);
    last = atomicAdd(done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  double mine = 0;
  const volatile double* partials = scratch;  // written by other blocks of this kernel
  for (unsigned b = threadIdx.x; b < gridDim.x; b += kThreads) mine = add(mine, partials[b]);
  const double all = block_sum(mine);
  if (threadIdx.x == 0) *distance = all;
}

// -------------------------------------------------------------------------------- launchers

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Blocks for this many threads' worth of work: enough to fill the device, at least one.
dim3 grid_for(int64_t threads) {
  int device = 0, sms = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "the SM count");
  int64_t grid = (threads + kThreads - 1) / kThreads;
  grid = grid < int64_t(sms) * kBlocksPerSm ? grid : int64_t(sms) * kBlocksPerSm;
  grid = grid < kCudaScratch - 1 ? grid : kCudaScratch - 1;
  return dim3(static_cast<unsigned>(grid > 0 ? grid : 1));
}

}  // namespace
}  // namespace oldsgd
