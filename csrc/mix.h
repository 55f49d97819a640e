// The mixing op as a plain C++ API: raw pointers and sizes, no torch header.
//
//   gradient form   out = w_0 y_i + sum_j w_j y_j - alpha acc     (acc = 0 afterwards if zero_acc)
//   delta form      x  += sum_j w_j (y_j - y_i)
//
// and y_next = wire(result) in the same pass. One pass: each input is read once, each output
// written once. The caller has checked types, sizes and aliasing: an output is an input exactly or
// not at all.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace oldsgd {

enum class Form { gradient, delta };
enum class Dtype { f64, f32, bf16, f16 };

inline int64_t size_of(Dtype t) { return t == Dtype::f64 ? 8 : t == Dtype::f32 ? 4 : 2; }

// The wire has the model's type or a narrower one.
inline bool wire_fits(Dtype model, Dtype wire) {
  return model == wire || size_of(wire) < size_of(model);
}

struct Mix {
  Form form = Form::gradient;
  Dtype model = Dtype::f32, wire = Dtype::f32;
  int64_t n = 0;                        // elements
  void* out = nullptr;                  // model; x in the delta form, which reads it too
  const void* y_self = nullptr;         // wire
  std::vector<const void*> neighbours;  // wire
  std::vector<double> weights;          // one more than neighbours, the own weight first
  void* acc = nullptr;                  // model, or null
  double alpha = 0;
  bool zero_acc = false;       // only with acc
  void* y_next = nullptr;      // wire, or null; may be y_self
  double* distance = nullptr;  // delta form: sum_j w_j ||y_j - y_i||^2, or null

  int64_t degree() const { return static_cast<int64_t>(neighbours.size()); }
};

// The same for every row of (rows, d) matrices; row i's neighbours are rows indices[k] of y with
// weights[k], k in indptr[i]:indptr[i+1]. No buffer may overlap another. A graph that points
// outside throws std::invalid_argument before anything is written.
struct MixRows {
  Form form = Form::gradient;
  Dtype model = Dtype::f32, wire = Dtype::f32;
  int64_t rows = 0, d = 0, edges = 0;                   // edges: the length of indices and weights
  int64_t stride = 0;                                   // elements from row to row of out and acc
  void* out = nullptr;                                  // model
  const void* y = nullptr;                              // wire
  const int64_t *indptr = nullptr, *indices = nullptr;  // CSR
  const double *weights = nullptr, *self_weights = nullptr;
  const void* acc = nullptr;  // model, or null
  double alpha = 0;
  double* distance = nullptr;  // one per row, or null
};

// CPU. Blocks until done; the result does not depend on `threads`.
void mix_cpu(const Mix& m, int threads);
void mix_rows_cpu(const MixRows& m, int threads);
const char* isa_in_use();  // portable, avx2 or avx512; HPC_OLDSGD_ISA chooses a lower one
// The roofline of the benchmark: a copy with non-temporal stores where there are any.
void stream_copy(void* dst, const void* src, int64_t bytes, int threads);

// CUDA. Enqueues one kernel on `stream` and returns; throws if the launch is refused.
constexpr int kMaxFixedDegree = 64;  // neighbours that travel inside the kernel's arguments
constexpr int kMostBlocks = 4095;
// Doubles, when m.distance is set: zero before the first use and left so. One for each stream.
constexpr int64_t kCudaScratch = kMostBlocks + 1;
// `table`: past the fixed degree, device memory with the addresses, then the weights (double).
void mix_cuda(const Mix& m, void* stream, const void* table, void* scratch);
bool cuda_compiled();
std::string cuda_refusal();  // why the current device does not run the kernels; empty if it does
std::string cuda_archs();

}  // namespace oldsgd
