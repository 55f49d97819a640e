// The difference wire under a sanitizer: every kernel on buffers of exactly its size.
#include <vector>

#include "../../csrc/narrow.h"
#include "../../csrc/narrow_math.h"
#include "sanitized.h"

using namespace oldsgd;

namespace {

// The bits are arbitrary, so there are NaN, infinities and subnormals too.
struct Wire {
  Buffer x, z, next;
  std::vector<Buffer> copies, messages;
  double distance = 0;

  Wire(Dtype model, int bits, int64_t n, int degree, int64_t shift)
      : x(n * size_of(model), shift * size_of(model), 1),
        z(n * size_of(model), shift * size_of(model), 2),
        next(message_bytes(n, bits), shift, 3) {
    copies.reserve(static_cast<size_t>(degree));
    messages.reserve(static_cast<size_t>(degree));
    for (unsigned j = 0; j < static_cast<unsigned>(degree); ++j) {
      copies.emplace_back(n * size_of(model), shift * size_of(model), 5 + j);
      messages.emplace_back(message_bytes(n, bits), shift, 50 + j);
    }
  }

  Narrow arguments(Dtype model, int bits, int64_t n, bool encodes, bool measures) {
    Narrow m;
    m.model = model, m.bits = bits, m.n = n;
    m.x = x.data(), m.z_self = z.data();
    for (Buffer& copy : copies) m.copies.push_back(copy.data());
    for (Buffer& message : messages) m.messages.push_back(message.data());
    m.weights.assign(copies.size() + 1, 0.25);
    m.next = encodes ? next.data() : nullptr;
    m.distance = measures ? &distance : nullptr;
    return m;
  }

  bool operator==(const Wire& o) const {
    bool same = x == o.x && z == o.z && next == o.next && same_bits(distance, o.distance);
    for (size_t j = 0; j < copies.size(); ++j) same = same && copies[j] == o.copies[j];
    return same;
  }
};

// What an instruction set computes, straight through its table.
[[maybe_unused]] void run_kernel(const Kernels& k, const Narrow& m) {
  std::vector<float> f(m.weights.begin() + 1, m.weights.end());
  std::vector<double> partials(static_cast<size_t>((m.n + kBlock - 1) / kBlock));
  const void* d = m.weights.data() + 1;
  const NarrowWork work{m.x,
                        m.z_self,
                        m.copies.data(),
                        m.messages.data(),
                        m.model == Dtype::f64 ? d : f.data(),
                        m.degree(),
                        m.next,
                        code_bytes(m.n, m.bits)};
  const int form = 2 + (m.distance ? 1 : 0) + (m.next ? 2 : 0);
  const auto& of_model = k.narrow->run[static_cast<int>(m.model)];
  of_model[m.bits == 8 ? 0 : 1][form](work, 0, m.n, partials.data());
  if (m.distance) {
    *m.distance = 0;
    for (double part : partials) *m.distance += part;
  }
}

void rows(Dtype model, int bits, int64_t d) {
  const int64_t size = message_bytes(d, bits);
  const Buffer x(3 * d * size_of(model), 0, 1);
  Buffer one(3 * d * size_of(model), 0, 2), many(one), received(one);
  Buffer sent(3 * size, 1, 3), again(3 * size, 1, 4);
  const auto run = [&](const void* from, Buffer& z, Buffer& message, int threads) {
    NarrowRows m;
    m.model = model, m.bits = bits, m.rows = 3, m.d = d;
    m.x_stride = m.z_stride = d, m.message_stride = size;
    m.x = from, m.z = z.data(), m.message = message.data();
    narrow_rows_cpu(m, threads);
  };
  run(x.data(), one, sent, 1);
  run(x.data(), many, again, 3);
  run(nullptr, received, sent, 2);
  CHECK(one == many && sent == again && received == one);
}

}  // namespace

void oldsgd::narrow_agrees() {
#ifndef __SANITIZE_THREAD__  // one thread has no races, and this takes long
  const auto sets = instruction_sets();
  for (Dtype model : kTypes)
    for (int bits : {8, 4}) {
      for (int64_t n : {0, 1, 15, 64, 129, 4096 + 67})
        for (int degree : {0, 1, 3})
          for (int how = 0; how < 4; ++how) {
            const int64_t shift = degree % 2;
            Wire expected(model, bits, n, degree, shift);
            narrow_cpu(expected.arguments(model, bits, n, how & 1, how & 2), 1);
            for (const Kernels* set : sets) {
              Wire found(model, bits, n, degree, shift);
              run_kernel(*set, found.arguments(model, bits, n, how & 1, how & 2));
              CHECK(found == expected);
            }
          }
    }
#endif
  for (int64_t d : {0, 1, 3 * 4096 + 5})
    for (int bits : {8, 4}) rows(Dtype::bf16, bits, d);
  const int64_t n = 40 * kBlock + 7;
  Wire one(Dtype::f32, 4, n, 2, 1), many(Dtype::f32, 4, n, 2, 1);
  narrow_cpu(one.arguments(Dtype::f32, 4, n, true, true), 1);
  narrow_cpu(many.arguments(Dtype::f32, 4, n, true, true), 4);
  CHECK(one == many);
}
