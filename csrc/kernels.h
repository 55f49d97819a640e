// What an instruction set offers. kernels.cpp is compiled once for each, mix_cpu.cpp chooses.
#pragma once

#include <cstdint>

#include "mix.h"

namespace oldsgd {

// The distance is summed in double, in 16 lanes over blocks of this many elements, then lane by
// lane and block by block: the same bits for every instruction set and number of threads.
constexpr int64_t kBlock = 4096;
constexpr int kLanes = 16;

// One mix, with the weights already in the accumulation type (float, or double for a double model).
struct Work {
  void* out;
  const void* y_self;
  const void* const* neighbours;
  const void* weights;  // of the neighbours
  int64_t degree;
  double w_self, alpha;
  void* acc;
  void* y_next;
  bool zero_acc;
  bool stream_out, stream_next;  // past the cache: aligned, and not read in this pass
};

// Elements [begin, end), begin a multiple of kBlock; partials[b] receives the distance of block b.
using Kernel = void (*)(const Work&, int64_t begin, int64_t end, double* partials);

struct Kernels {
  Kernel mix[4][4][3];  // [model][wire][gradient, delta, delta with distance]; null if unfit
  void (*stream_copy)(char* dst, const char* src, int64_t bytes);
};

const Kernels& kernels_portable();
#ifdef OLDSGD_X86
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

}  // namespace oldsgd
