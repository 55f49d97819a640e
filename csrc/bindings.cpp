// hpc_oldsgd._native: mix.h for Python. Addresses come as integers, already checked by ops.py; the
// GIL is released while the memory is moved.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <vector>

#include "mix.h"
#include "pool.h"

namespace py = pybind11;
using namespace oldsgd;

namespace oldsgd {
void bind_progress(py::module_& m);  // progress_bindings.cpp
}

namespace {

void* address(uintptr_t p) { return reinterpret_cast<void*>(p); }

Mix make(int form, int model, int wire, int64_t n, uintptr_t out, uintptr_t y_self,
         const std::vector<uintptr_t>& neighbours, const std::vector<double>& weights,
         uintptr_t acc, double alpha, bool zero_acc, uintptr_t y_next, uintptr_t distance) {
  static_assert(sizeof(uintptr_t) == sizeof(void*), "an address list is a pointer list");
  if (weights.size() != neighbours.size() + 1)
    throw std::invalid_argument("weights must be one more than neighbours");
  return {static_cast<Form>(form),
          static_cast<Dtype>(model),
          static_cast<Dtype>(wire),
          n,
          address(out),
          address(y_self),
          reinterpret_cast<const void* const*>(neighbours.data()),
          weights.data(),
          static_cast<int64_t>(neighbours.size()),
          address(acc),
          alpha,
          zero_acc && acc,
          address(y_next),
          static_cast<double*>(address(distance))};
}

py::dict build_info() {
  py::dict info;
  info["compiler"] = OLDSGD_COMPILER;
  info["isa"] = isa_in_use();
  info["cuda"] = cuda_compiled();
  info["cuda_archs"] = cuda_archs();
  return info;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "The fused mixing op; use hpc_oldsgd.ops.";
  bind_progress(m);
  m.def("build_info", build_info);
  m.attr("API") = 3;  // ops.py asks for this one; raise both when a signature here changes
  m.attr("MAX_FIXED_DEGREE") = kMaxFixedDegree;
  m.attr("CUDA_SCRATCH") = kCudaScratch;

  m.def("mix", [](int form, int model, int wire, int64_t n, uintptr_t out, uintptr_t y_self,
                  const std::vector<uintptr_t>& neighbours, const std::vector<double>& weights,
                  uintptr_t acc, double alpha, bool zero_acc, uintptr_t y_next, uintptr_t distance,
                  int threads) {
    const Mix mix = make(form, model, wire, n, out, y_self, neighbours, weights, acc, alpha,
                         zero_acc, y_next, distance);
    py::gil_scoped_release release;
    mix_cpu(mix, threads);
  });

  m.def("mix_cuda", [](int form, int model, int wire, int64_t n, uintptr_t out, uintptr_t y_self,
                       const std::vector<uintptr_t>& neighbours, const std::vector<double>& weights,
                       uintptr_t acc, double alpha, bool zero_acc, uintptr_t y_next,
                       uintptr_t distance, uintptr_t stream, uintptr_t table, uintptr_t scratch) {
    const Mix mix = make(form, model, wire, n, out, y_self, neighbours, weights, acc, alpha,
                         zero_acc, y_next, distance);
    py::gil_scoped_release release;
    mix_cuda(mix, address(stream), address(table), address(scratch));
  });

  m.def("mix_rows",
        [](int form, int model, int wire, int64_t rows, int64_t d, int64_t edges, uintptr_t out,
           uintptr_t y, uintptr_t indptr, uintptr_t indices, uintptr_t weights,
           uintptr_t self_weights, uintptr_t acc, double alpha, uintptr_t distance, int threads) {
          const MixRows mix{static_cast<Form>(form),
                            static_cast<Dtype>(model),
                            static_cast<Dtype>(wire),
                            rows,
                            d,
                            edges,
                            address(out),
                            address(y),
                            static_cast<const int64_t*>(address(indptr)),
                            static_cast<const int64_t*>(address(indices)),
                            static_cast<const double*>(address(weights)),
                            static_cast<const double*>(address(self_weights)),
                            address(acc),
                            alpha,
                            static_cast<double*>(address(distance))};
          py::gil_scoped_release release;
          mix_rows_cpu(mix, threads);
        });

  m.def("join_team", [](uintptr_t entry) { join_team(reinterpret_cast<Team>(entry)); });

  m.def("stream_copy", [](uintptr_t dst, uintptr_t src, int64_t bytes, int threads) {
    py::gil_scoped_release release;
    stream_copy(address(dst), address(src), bytes, threads);
  });
}
