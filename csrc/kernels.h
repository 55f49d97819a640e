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

// One pass of the difference wire, as narrow.h says; weights as in Work.
struct NarrowWork {
  void *x, *z;          // null where only copies are updated; x is not written by `encode`
  void* const* copies;  // of the neighbours' z
  const void* const* messages;
  const void* weights;
  int64_t degree;
  void* next;      // the message to be written, or null
  int64_t scales;  // where a message's scales begin
};
using NarrowKernel = void (*)(const NarrowWork&, int64_t begin, int64_t end, double* partials);
enum class NarrowForm {
  decode,
  encode,
  mix,
  mix_distance,
  round,
  round_distance
};  // round: + next

struct NarrowKernels {
  NarrowKernel run[4][2][6];  // [model][8 bits, 4 bits][form]
};

struct Kernels {
  Kernel mix[4][4][3];  // [model][wire][gradient, delta, delta with distance]; null if unfit
  const NarrowKernels* narrow;
  void (*stream_copy)(char* dst, const char* src, int64_t bytes);
};

const Kernels& kernels_portable();
const NarrowKernels& narrow_kernels_portable();
#ifdef OLDSGD_X86
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const NarrowKernels& narrow_kernels_avx2();
const NarrowKernels& narrow_kernels_avx512();
#endif

// mix_cpu.cpp, for narrow_cpu.cpp.
const Kernels& kernels_in_use();
constexpr int64_t kWorthThreads = 16 * kBlock;  // elements; fewer are done before a thread is awake
double sum(const double* partials, int64_t count);

// The neighbours' weights in the accumulation type.
class Weights {
 public:
  Weights(Dtype model, const double* w, int64_t count);
  const void* at(int64_t k) const;

 private:
  std::vector<float> f_;
  std::vector<double> d_;
};

}  // namespace oldsgd
