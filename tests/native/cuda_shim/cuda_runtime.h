// Imitates CUDA on the host, so that g++ compiles csrc/*.cu unchanged and a test can run them.
//
// Blocks run one after the other, the last first; the threads of a block are fibres that run until
// they wait for others or end. What this cannot show: races within a warp, speed, device
// conversions.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct alignas(8) uint2 {
  uint32_t x, y;
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = 2, cudaSuccess;  // few, so that threads stride over the grid several times
}

struct cudaFuncAttributes {};
template <class K>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, K) {
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <class K>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, K, int, size_t) {
  return *blocks = 3, cudaSuccess;
}

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
// As on the device, an access to an address that is no multiple of its size is an error.
template <class Word>
Word __ldcs(const Word* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(Word)) std::abort();
  return *p;
}
template <class Word>
void __stcs(Word* p, Word v) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(Word)) std::abort();
  *p = v;
}
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* p, unsigned v) { return (*p += v) - v; }

namespace shim {

struct Fibre {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 << 10);
  bool running = false;
};
inline ucontext_t scheduler;
inline Fibre* current = nullptr;
inline void (*body)(void*) = nullptr;
inline void* body_argument = nullptr;

inline void enter() {
  body(body_argument);
  current->running = false;
}

inline void run_block(std::vector<Fibre>& fibres) {
  for (Fibre& f : fibres) {
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = &scheduler;
    f.running = true;
    makecontext(&f.context, enter, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (unsigned t = 0; t < fibres.size(); ++t) {
      if (!fibres[t].running) continue;
      any = true;
      current = &fibres[t];
      threadIdx = dim3(t, 0, 0);
      swapcontext(&scheduler, &current->context);
    }
  }
}

}  // namespace shim

namespace shim {

inline void yield() {
  Fibre* self = current;
  const dim3 me = threadIdx;
  swapcontext(&self->context, &scheduler);
  current = self;
  threadIdx = me;
}

struct Barrier {
  unsigned waiting = 0, generation = 0;
  void wait(unsigned count) {
    const unsigned mine = generation;
    if (++waiting == count) {
      waiting = 0;
      ++generation;
    }
    while (generation == mine) yield();
  }
};
inline Barrier block_barrier, warp_barriers[1024 / 32];
inline uint64_t exchanged[1024];

}  // namespace shim

inline void __syncthreads() { shim::block_barrier.wait(blockDim.x); }

template <class V>
V __shfl_xor_sync(unsigned mask, V v, int lanes) {
  if (mask != 0xffffffffu) std::abort();
  const unsigned t = threadIdx.x;
  memcpy(&shim::exchanged[t], &v, sizeof v);
  shim::warp_barriers[t / 32].wait(32);
  V other;
  memcpy(&other, &shim::exchanged[t ^ static_cast<unsigned>(lanes)], sizeof other);
  shim::warp_barriers[t / 32].wait(32);
  return other;
}

template <class P>
cudaError_t cudaLaunchKernel(void (*kernel)(P), dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t) {
  if (grid.x == 0 || block.x == 0 || block.x > 1024) return cudaErrorInvalidConfiguration;
  struct Call {
    void (*kernel)(P);
    P* argument;
  } call{kernel, static_cast<P*>(arguments[0])};
  shim::body_argument = &call;
  shim::body = [](void* c) { static_cast<Call*>(c)->kernel(*static_cast<Call*>(c)->argument); };
  gridDim = grid;
  blockDim = block;
  static std::vector<shim::Fibre> fibres;
  fibres.resize(block.x);
  for (unsigned b = grid.x; b-- > 0;) {
    blockIdx = dim3(b, 0, 0);
    shim::run_block(fibres);
  }
  return cudaSuccess;
}
