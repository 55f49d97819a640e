#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "progress.h"

namespace py = pybind11;

namespace oldsgd {

void bind_progress(py::module_& m) {
  py::class_<Stage>(m, "Stage")
      .def(py::init([](uintptr_t requests, int receives, int count, bool start) {
        Stage stage;
        stage.requests = reinterpret_cast<char*>(requests);
        stage.receives = receives;
        stage.count = count;
        stage.start = start;
        return stage;
      }))
      .def("then_add", [](Stage& stage, uintptr_t dst, uintptr_t src, int64_t n, Dtype dtype) {
        stage.add_dst = reinterpret_cast<void*>(dst);
        stage.add_src = reinterpret_cast<void*>(src);
        stage.add_count = n;
        stage.add_dtype = dtype;
      });

  py::class_<Job, std::shared_ptr<Job>>(m, "Job")
      .def_property_readonly("done", [](const Job& job) { return job.done.load(); })
      .def_readonly("done_s", &Job::done_s)
      .def_readonly("error", &Job::error);

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Engine>(m, "Engine")
      .def(py::init<uintptr_t, uintptr_t, size_t, size_t, double, bool>())
      .def("submit", &Engine::submit, no_gil)
      .def("wait", &Engine::wait, no_gil)
      .def("enter", &Engine::enter)
      .def("poll", &Engine::poll, no_gil)
      .def("stop", &Engine::stop, no_gil);
}

}  // namespace oldsgd
