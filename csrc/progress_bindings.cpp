#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "progress.h"

namespace py = pybind11;

namespace oldsgd {

void bind_progress(py::module_& m) {
  py::class_<Job, std::shared_ptr<Job>>(m, "Job")
      .def_property_readonly("done", [](const Job& job) { return job.done.load(); })
      .def_readonly("done_s", &Job::done_s)
      .def_readonly("error", &Job::error);

  // requests, receives, count, start, then what is added afterwards: dst, src, count, dtype
  using Packed = std::tuple<uintptr_t, int, int, bool, uintptr_t, uintptr_t, int64_t, int>;
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<Engine>(m, "Engine")
      .def(py::init<uintptr_t, uintptr_t, size_t, size_t, double, bool>())
      .def("submit",
           [](Engine& engine, const std::vector<Packed>& packed) {
             std::vector<Stage> stages;
             for (const auto& [requests, receives, count, start, dst, src, n, dtype] : packed) {
               stages.push_back({reinterpret_cast<char*>(requests), receives, count, start,
                                 reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), n,
                                 dtype});
             }
             py::gil_scoped_release no_gil;
             return engine.submit(std::move(stages));
           })
      .def("wait",
           [](Engine& engine, const std::shared_ptr<Job>& job, double timeout_s) {
             py::gil_scoped_release no_gil;
             return engine.wait(*job, timeout_s);
           })
      .def("poll", &Engine::poll, release)
      .def("stop", &Engine::stop, release);
}

}  // namespace oldsgd
