// hpc_oldsgd._native: mix.h and narrow.h for Python. Addresses are integers; ops/checks.py has
// checked the tensors behind them. The GIL is released while memory is moved.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <vector>

#include "mix.h"
#include "narrow.h"
#include "parallel.h"

namespace py = pybind11;
using namespace oldsgd;

namespace oldsgd {
void bind_progress(py::module_& m);  // progress_bindings.cpp
}

namespace {

void* pointer(uintptr_t p) { return reinterpret_cast<void*>(p); }

// A struct of mix.h as a Python class whose attributes are set one by one.
template <class S>
struct Record : py::class_<S> {
  Record(py::module_& m, const char* name) : py::class_<S>(m, name) { this->def(py::init<>()); }

  template <class V>
  Record& value(const char* name, V S::* field) {
    this->def_readwrite(name, field);
    return *this;
  }
  template <class P>
  Record& address(const char* name, P* S::* field) {
    this->def_property(name, nullptr,
                       [field](S& s, uintptr_t p) { s.*field = reinterpret_cast<P*>(p); });
    return *this;
  }
};

void set_neighbours(Mix& mix, const std::vector<uintptr_t>& addresses,
                    std::vector<double> weights) {
  if (weights.size() != addresses.size() + 1)
    throw std::invalid_argument("weights must be one more than neighbours");
  mix.neighbours.clear();
  for (uintptr_t p : addresses) mix.neighbours.push_back(pointer(p));
  mix.weights = std::move(weights);
}

void set_copies(Narrow& narrow, const std::vector<uintptr_t>& copies,
                const std::vector<uintptr_t>& messages, std::vector<double> weights) {
  if (weights.size() != copies.size() + 1 || messages.size() != copies.size())
    throw std::invalid_argument("as many messages as copies, and one weight more");
  narrow.copies.clear();
  narrow.messages.clear();
  for (uintptr_t p : copies) narrow.copies.push_back(pointer(p));
  for (uintptr_t p : messages) narrow.messages.push_back(pointer(p));
  narrow.weights = std::move(weights);
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
  m.def("build_info", build_info);
  m.def("cuda_refusal", cuda_refusal);
  m.attr("API") = OLDSGD_API;  // from ops/native.py when this was built
  m.attr("MAX_FIXED_DEGREE") = kMaxFixedDegree;
  m.attr("CUDA_SCRATCH") = kCudaScratch;

  py::enum_<Form>(m, "Form").value("gradient", Form::gradient).value("delta", Form::delta);
  py::enum_<Dtype>(m, "Dtype")
      .value("f64", Dtype::f64)
      .value("f32", Dtype::f32)
      .value("bf16", Dtype::bf16)
      .value("f16", Dtype::f16);

  Record<Mix>(m, "Mix")
      .value("form", &Mix::form)
      .value("model", &Mix::model)
      .value("wire", &Mix::wire)
      .value("n", &Mix::n)
      .value("alpha", &Mix::alpha)
      .value("zero_acc", &Mix::zero_acc)
      .address("out", &Mix::out)
      .address("y_self", &Mix::y_self)
      .address("acc", &Mix::acc)
      .address("y_next", &Mix::y_next)
      .address("distance", &Mix::distance)
      .def("set_neighbours", set_neighbours);

  Record<MixRows>(m, "MixRows")
      .value("form", &MixRows::form)
      .value("model", &MixRows::model)
      .value("wire", &MixRows::wire)
      .value("rows", &MixRows::rows)
      .value("d", &MixRows::d)
      .value("edges", &MixRows::edges)
      .value("stride", &MixRows::stride)
      .value("alpha", &MixRows::alpha)
      .address("out", &MixRows::out)
      .address("y", &MixRows::y)
      .address("indptr", &MixRows::indptr)
      .address("indices", &MixRows::indices)
      .address("weights", &MixRows::weights)
      .address("self_weights", &MixRows::self_weights)
      .address("acc", &MixRows::acc)
      .address("distance", &MixRows::distance);

  Record<Narrow>(m, "Narrow")
      .value("model", &Narrow::model)
      .value("bits", &Narrow::bits)
      .value("n", &Narrow::n)
      .address("x", &Narrow::x)
      .address("z_self", &Narrow::z_self)
      .address("next", &Narrow::next)
      .address("distance", &Narrow::distance)
      .def("set_copies", set_copies);

  Record<NarrowRows>(m, "NarrowRows")
      .value("model", &NarrowRows::model)
      .value("bits", &NarrowRows::bits)
      .value("rows", &NarrowRows::rows)
      .value("d", &NarrowRows::d)
      .value("x_stride", &NarrowRows::x_stride)
      .value("z_stride", &NarrowRows::z_stride)
      .value("message_stride", &NarrowRows::message_stride)
      .address("x", &NarrowRows::x)
      .address("z", &NarrowRows::z)
      .address("message", &NarrowRows::message);

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("mix", mix_cpu, no_gil);
  m.def("mix_rows", mix_rows_cpu, no_gil);
  m.def(
      "mix_cuda",
      [](const Mix& mix, uintptr_t stream, uintptr_t table, uintptr_t scratch) {
        mix_cuda(mix, pointer(stream), pointer(table), pointer(scratch));
      },
      no_gil);
  m.def("message_bytes", message_bytes);
  m.def("narrow", narrow_cpu, no_gil);
  m.def("narrow_rows", narrow_rows_cpu, no_gil);
  m.def(
      "narrow_cuda",
      [](const Narrow& narrow, uintptr_t stream, uintptr_t table, uintptr_t scratch) {
        narrow_cuda(narrow, pointer(stream), pointer(table), pointer(scratch));
      },
      no_gil);
  m.def(
      "narrow_rows_cuda",
      [](const NarrowRows& rows, uintptr_t stream) { narrow_rows_cuda(rows, pointer(stream)); },
      no_gil);
  m.def(
      "stream_copy",
      [](uintptr_t dst, uintptr_t src, int64_t bytes, int threads) {
        stream_copy(pointer(dst), pointer(src), bytes, threads);
      },
      no_gil);
  m.def("join_team", [](uintptr_t entry) { join_team(reinterpret_cast<Team>(entry)); });
  bind_progress(m);
}
