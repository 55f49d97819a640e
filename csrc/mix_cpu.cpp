// The CPU side of mix.h: chooses the instruction set, the stores and the split over threads.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "kernels.h"
#include "mix.h"
#include "parallel.h"

namespace oldsgd {
namespace {

struct Isa {
  const char* name;
  const Kernels& kernels;
};

Isa choose_isa() {
  const char* wish = std::getenv("HPC_OLDSGD_ISA");
  const std::string limit = wish && *wish ? wish : "avx512";
  if (limit != "portable" && limit != "avx2" && limit != "avx512")
    throw std::invalid_argument("HPC_OLDSGD_ISA is '" + limit + "': use portable, avx2 or avx512.");
#ifdef OLDSGD_X86
  __builtin_cpu_init();
  if (limit == "avx512" && __builtin_cpu_supports("avx512f")) return {"avx512", kernels_avx512()};
  if (limit != "portable" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
    return {"avx2", kernels_avx2()};
#endif
  return {"portable", kernels_portable()};
}

const Isa& isa() {
  static const Isa chosen = choose_isa();
  return chosen;
}

// The last-level cache this core can use. sysconf counts the caches of other cores too on some
// machines.
int64_t cache_bytes() {
  static const int64_t bytes = [] {
    for (const char* level : {"3", "2"}) {
      const std::string path =
          std::string("/sys/devices/system/cpu/cpu0/cache/index") + level + "/size";
      if (FILE* f = std::fopen(path.c_str(), "r")) {
        long kib = 0;
        const int found = std::fscanf(f, "%ldK", &kib);
        std::fclose(f);
        if (found == 1 && kib > 0) return int64_t{kib} * 1024;
      }
    }
    return int64_t{32} << 20;
  }();
  return bytes;
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

Kernel kernel_for(Form form, Dtype model, Dtype wire, bool distance) {
  const int f = form == Form::gradient ? 0 : distance ? 2 : 1;
  return isa().kernels.mix[static_cast<int>(model)][static_cast<int>(wire)][f];
}

void check_graph(const MixRows& m) {
  bool rises = m.indptr[0] == 0 && m.indptr[m.rows] == m.edges;
  for (int64_t i = 0; i < m.rows; ++i) rises = rises && m.indptr[i] <= m.indptr[i + 1];
  if (!rises)
    throw std::invalid_argument("indptr must rise from 0 to the " + std::to_string(m.edges) +
                                " indices.");
  for (int64_t k = 0; k < m.edges; ++k)
    if (m.indices[k] < 0 || m.indices[k] >= m.rows)
      throw std::invalid_argument("indices must lie in 0.." + std::to_string(m.rows - 1) +
                                  ", the rows of y.");
}

}  // namespace

const char* isa_in_use() { return isa().name; }
const Kernels& kernels_in_use() { return isa().kernels; }

double sum(const double* partials, int64_t count) {
  double total = 0;
  for (int64_t b = 0; b < count; ++b) total += partials[b];
  return total;
}

Weights::Weights(Dtype model, const double* w, int64_t count) {
  if (model == Dtype::f64) {
    d_.assign(w, w + count);
  } else {
    f_.assign(w, w + count);
    for (float& f : f_)  // the low half of a NaN is zero: `keep` of vec_*.h counts on it
      if (f != f) f = std::numeric_limits<float>::quiet_NaN();
  }
}

const void* Weights::at(int64_t k) const {
  if (!d_.empty()) return d_.data() + k;
  return f_.data() + k;
}

void mix_cpu(const Mix& m, int threads) {
  const Kernel kernel = kernel_for(m.form, m.model, m.wire, m.distance != nullptr);
  const Weights weights(m.model, m.weights.data() + 1, m.degree());
  const auto& near = m.neighbours;
  Work job{m.out,   m.y_self, near.data(), weights.at(0), m.degree(), m.weights[0],
           m.alpha, m.acc,    m.y_next,    m.zero_acc,    false,      false};

  // A store past the cache saves reading the line first. Where the line is read anyway it saves
  // nothing, so an output that is also an input is stored as usual.
  const bool big = m.n * size_of(m.model) > cache_bytes();
  const auto is_input = [&](const void* p) {
    return p == m.y_self || p == m.acc || std::find(near.begin(), near.end(), p) != near.end();
  };
  job.stream_out = big && m.form == Form::gradient && aligned(m.out) && !is_input(m.out);
  job.stream_next = big && m.y_next && aligned(m.y_next) && !is_input(m.y_next);

  const int64_t blocks = (m.n + kBlock - 1) / kBlock;
  std::vector<double> partials(m.distance ? blocks : 0);
  const auto task = [&](int64_t first, int64_t last) {
    kernel(job, first * kBlock, std::min(last * kBlock, m.n), partials.data());
  };
  parallel(blocks, m.n < kWorthThreads ? 1 : threads, task);
  if (m.distance) *m.distance = sum(partials.data(), blocks);
}

void mix_rows_cpu(const MixRows& m, int threads) {
  check_graph(m);
  const Kernel kernel = kernel_for(m.form, m.model, m.wire, m.distance != nullptr);
  const Weights weights(m.model, m.weights, m.edges);
  const int64_t out_row = m.stride * size_of(m.model), y_row = m.d * size_of(m.wire);
  const bool stream = m.form == Form::gradient && m.rows * out_row > cache_bytes() &&
                      out_row % 64 == 0 && aligned(m.out);
  const auto* y = static_cast<const char*>(m.y);

  const int64_t blocks = (m.d + kBlock - 1) / kBlock;  // of one row
  std::vector<double> partials(m.distance ? m.rows * blocks : 0);
  const auto task = [&](int64_t first, int64_t last) {
    std::vector<const void*> neighbours;
    for (int64_t u = first; u < last;) {
      const int64_t row = u / blocks, b = u % blocks, e = std::min(blocks, b + last - u);
      neighbours.clear();
      for (int64_t k = m.indptr[row]; k < m.indptr[row + 1]; ++k)
        neighbours.push_back(y + m.indices[k] * y_row);
      char* acc = m.acc ? static_cast<char*>(const_cast<void*>(m.acc)) + row * out_row : nullptr;
      Work job{};
      job.out = static_cast<char*>(m.out) + row * out_row;
      job.y_self = y + row * y_row;
      job.neighbours = neighbours.data();
      job.weights = weights.at(m.indptr[row]);
      job.degree = m.indptr[row + 1] - m.indptr[row];
      job.w_self = m.self_weights ? m.self_weights[row] : 0.0;
      job.alpha = m.alpha;
      job.acc = acc;
      job.stream_out = stream;
      kernel(job, b * kBlock, std::min(e * kBlock, m.d), partials.data() + row * blocks);
      u += e - b;
    }
  };
  parallel(m.rows * blocks, m.rows * m.d < kWorthThreads ? 1 : threads, task);
  if (m.distance)
    for (int64_t i = 0; i < m.rows; ++i) m.distance[i] = sum(partials.data() + i * blocks, blocks);
}

void stream_copy(void* dst, const void* src, int64_t bytes, int threads) {
  const int64_t chunk = 1 << 16, chunks = (bytes + chunk - 1) / chunk;
  const auto task = [&](int64_t first, int64_t last) {
    const int64_t at = first * chunk, end = std::min(last * chunk, bytes);
    isa().kernels.stream_copy(static_cast<char*>(dst) + at, static_cast<const char*>(src) + at,
                              end - at);
  };
  parallel(chunks, threads, task);
}

}  // namespace oldsgd
