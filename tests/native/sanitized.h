// What the sanitized programs share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../csrc/kernels.h"
#include "../../csrc/mix.h"

#define CHECK(what)                                                   \
  do {                                                                \
    if (!(what)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
      std::exit(1);                                                   \
    }                                                                 \
  } while (0)

namespace oldsgd {

// Exactly `bytes` long and `shift` bytes off a cache line: a read past either end is reported.
class Buffer {
 public:
  Buffer(int64_t bytes, int64_t shift, unsigned seed) : bytes_(bytes), shift_(shift) {
    CHECK(posix_memalign(&memory_, 64, static_cast<size_t>(bytes + shift) + !bytes) == 0);
    auto* p = static_cast<unsigned char*>(data());
    for (int64_t k = 0; k < bytes; ++k) p[k] = static_cast<unsigned char>((seed += 40503) >> 8);
  }
  Buffer(const Buffer& o) : Buffer(o.bytes_, o.shift_, 0) {
    std::memcpy(data(), o.data(), static_cast<size_t>(bytes_));
  }
  ~Buffer() { std::free(memory_); }
  void* data() const { return static_cast<char*>(memory_) + shift_; }
  bool operator==(const Buffer& o) const {
    return std::memcmp(data(), o.data(), static_cast<size_t>(bytes_)) == 0;
  }

 private:
  void* memory_ = nullptr;
  int64_t bytes_, shift_;
};

constexpr Dtype kTypes[] = {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16};

inline bool same_bits(double a, double b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b);
}

// Every instruction set there is; sanitized.cpp.
std::vector<const Kernels*> instruction_sets();
void narrow_agrees();  // sanitized_narrow.cpp

}  // namespace oldsgd
