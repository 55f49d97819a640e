// Stands in for mix.cu where nvcc is missing.
#include <stdexcept>

#include "mix.h"

namespace oldsgd {

void mix_cuda(const Mix&, void*, const void*, void*) {
  throw std::runtime_error("this build of hpc_oldsgd has no CUDA: reinstall it with nvcc in PATH");
}
bool cuda_compiled() { return false; }
std::string cuda_archs() { return ""; }

}  // namespace oldsgd
