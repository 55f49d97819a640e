// csrc/mix.cu for the host, behind a C function that ctypes can call.
#include "../../csrc/mix.cu"

extern "C" {
extern const int fixed_degree = oldsgd::kMaxFixedDegree;
extern const int scratch_doubles = oldsgd::kCudaScratch;

// `form` and the types count as the enums of mix.h do. Returns an error text or null.
const char* shim_mix(int form, int model, int wire, int64_t n, void* out, const void* y_self,
                     const void* const* neighbours, const double* weights, int64_t degree,
                     void* acc, double alpha, bool zero_acc, void* y_next, double* distance,
                     const void* table, void* scratch) {
  using namespace oldsgd;
  static std::string error;
  const Mix mix{static_cast<Form>(form),
                static_cast<Dtype>(model),
                static_cast<Dtype>(wire),
                n,
                out,
                y_self,
                std::vector<const void*>(neighbours, neighbours + degree),
                std::vector<double>(weights, weights + degree + 1),
                acc,
                alpha,
                zero_acc,
                y_next,
                distance};
  try {
    mix_cuda(mix, nullptr, table, scratch);
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
}
