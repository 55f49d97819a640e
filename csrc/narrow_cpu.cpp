// The CPU side of narrow.h: the split over threads.
#include <algorithm>
#include <stdexcept>

#include "kernels.h"
#include "narrow.h"
#include "narrow_math.h"
#include "parallel.h"

namespace oldsgd {
namespace {

NarrowKernel kernel_for(Dtype model, int bits, NarrowForm form) {
  if (bits != 8 && bits != 4) throw std::invalid_argument("a code has 8 or 4 bits");
  const auto& of_model = kernels_in_use().narrow->run[static_cast<int>(model)];
  return of_model[bits == 8 ? 0 : 1][static_cast<int>(form)];
}

template <class P>
P* at(P* p, int64_t bytes) {
  using Byte = typename std::conditional<std::is_const<P>::value, const char, char>::type;
  return static_cast<Byte*>(p) + bytes;
}

}  // namespace

int64_t message_bytes(int64_t n, int bits) {
  return code_bytes(n, bits) + (n + kScaleBlock - 1) / kScaleBlock * int64_t{sizeof(bf16)};
}

void narrow_cpu(const Narrow& m, int threads) {
  const auto form = m.next ? (m.distance ? NarrowForm::round_distance : NarrowForm::round)
                           : (m.distance ? NarrowForm::mix_distance : NarrowForm::mix);
  const NarrowKernel kernel = kernel_for(m.model, m.bits, form);
  const Weights weights(m.model, m.weights.data() + 1, m.degree());
  const NarrowWork work{m.x,           m.z_self,   m.copies.data(), m.messages.data(),
                        weights.at(0), m.degree(), m.next,          code_bytes(m.n, m.bits)};
  const int64_t blocks = (m.n + kBlock - 1) / kBlock;
  std::vector<double> partials(m.distance ? blocks : 0);
  const auto task = [&](int64_t first, int64_t last) {
    kernel(work, first * kBlock, std::min(last * kBlock, m.n), partials.data());
  };
  parallel(blocks, m.n < kWorthThreads ? 1 : threads, task);
  if (m.distance) *m.distance = sum(partials.data(), blocks);
}

void narrow_rows_cpu(const NarrowRows& m, int threads) {
  const auto form = m.x ? NarrowForm::encode : NarrowForm::decode;
  const NarrowKernel kernel = kernel_for(m.model, m.bits, form);
  const int64_t size = size_of(m.model), blocks = (m.d + kBlock - 1) / kBlock;  // of one row
  const auto task = [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last;) {
      const int64_t row = u / blocks, b = u % blocks, e = std::min(blocks, b + last - u);
      // encode does not write x.
      void* x = m.x ? at(const_cast<void*>(m.x), row * m.x_stride * size) : nullptr;
      void* z = at(m.z, row * m.z_stride * size);
      void* message = at(m.message, row * m.message_stride);
      const NarrowWork work{x, z, &z, &message, nullptr, 1, message, code_bytes(m.d, m.bits)};
      kernel(work, b * kBlock, std::min(e * kBlock, m.d), nullptr);
      u += e - b;
    }
  };
  parallel(m.rows * blocks, m.rows * m.d < kWorthThreads ? 1 : threads, task);
}

}  // namespace oldsgd
