// Stands in for mix.cu and narrow.cu where nvcc is missing.
#include <stdexcept>

#include "mix.h"
#include "narrow.h"

namespace oldsgd {
namespace {

[[noreturn]] void no_cuda() {
  throw std::runtime_error("this build of hpc_oldsgd has no CUDA: reinstall it with nvcc in PATH");
}

}  // namespace

void mix_cuda(const Mix&, void*, const void*, void*) { no_cuda(); }
void narrow_cuda(const Narrow&, void*, const void*, void*) { no_cuda(); }
void narrow_rows_cuda(const NarrowRows&, void*) { no_cuda(); }
bool cuda_compiled() { return false; }
std::string cuda_refusal() { return "built without CUDA"; }
std::string cuda_archs() { return ""; }

}  // namespace oldsgd
