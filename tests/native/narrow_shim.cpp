// csrc/narrow.cu for the host, behind C functions that ctypes can call.
#include "../../csrc/narrow.cu"

namespace {

template <class F>
const char* error_of(const F& f) {
  static std::string error;
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}

}  // namespace

extern "C" {
extern const int fixed_degree = oldsgd::kMaxFixedDegree;
extern const int scratch_doubles = oldsgd::kCudaScratch;

// `model` counts as the enum of mix.h does. Each returns an error text or null.
const char* shim_narrow(int model, int bits, int64_t n, void* x, void* z_self, void* const* copies,
                        const void* const* messages, const double* weights, int64_t degree,
                        void* next, double* distance, const void* table, void* scratch) {
  using namespace oldsgd;
  const Narrow narrow{static_cast<Dtype>(model),
                      bits,
                      n,
                      x,
                      z_self,
                      std::vector<void*>(copies, copies + degree),
                      std::vector<const void*>(messages, messages + degree),
                      std::vector<double>(weights, weights + degree + 1),
                      next,
                      distance};
  return error_of([&] { narrow_cuda(narrow, nullptr, table, scratch); });
}

const char* shim_rows(int model, int bits, int64_t rows, int64_t d, int64_t x_stride,
                      int64_t z_stride, int64_t message_stride, const void* x, void* z,
                      void* message) {
  using namespace oldsgd;
  const NarrowRows m{
      static_cast<Dtype>(model), bits, rows, d, x_stride, z_stride, message_stride, x, z, message};
  return error_of([&] { narrow_rows_cuda(m, nullptr); });
}
}
