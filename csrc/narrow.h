// The difference wire as a plain C++ API, beside mix.h.
//
//   copies_j += decoded messages_j;   x += sum_j w_j (copies_j - z_self)
//   next = Q(x - z_self);             z_self += decoded next           (with next)
//
// One pass: each input is read once, each output written once. narrow_math.h says what a message
// holds. The caller has checked types and sizes, and that no buffer that is written overlaps
// another.
#pragma once

#include <cstdint>
#include <vector>

#include "mix.h"

namespace oldsgd {

struct Narrow {
  Dtype model = Dtype::f32;
  int bits = 8;
  int64_t n = 0;  // elements
  void *x = nullptr, *z_self = nullptr;
  std::vector<void*> copies;
  std::vector<const void*> messages;
  std::vector<double> weights;  // one more than copies, the own weight first
  void* next = nullptr;         // or null
  double* distance = nullptr;   // sum_j w_j ||copies_j - z_self||^2, or null

  int64_t degree() const { return static_cast<int64_t>(copies.size()); }
};

// message = Q(x - z), z += decoded message; without x only the second. Row by row, each on its own.
struct NarrowRows {
  Dtype model = Dtype::f32;
  int bits = 8;
  int64_t rows = 0, d = 0;
  int64_t x_stride = 0, z_stride = 0, message_stride = 0;  // elements, and bytes of messages
  const void* x = nullptr;                                 // or null
  void *z = nullptr, *message = nullptr;
};

int64_t message_bytes(int64_t n, int bits);

// As mix_cpu and mix_cuda of mix.h. `table`: the addresses of the copies, those of the messages,
// then the weights.
void narrow_cpu(const Narrow& m, int threads);
void narrow_rows_cpu(const NarrowRows& m, int threads);
void narrow_cuda(const Narrow& m, void* stream, const void* table, void* scratch);
void narrow_rows_cuda(const NarrowRows& m, void* stream);

}  // namespace oldsgd
