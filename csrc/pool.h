// A few threads that wait for work. One thread asked for: no thread, lock or system call is
// touched.
#pragma once

#include <cstdint>
#include <functional>

namespace oldsgd {

// Runs task(begin, end) over [0, n) split into at most `threads` contiguous ranges, the caller
// taking one; returns when all are done. While another thread of this process uses the pool, the
// caller does all the work itself. Safe after fork: the child starts threads of its own.
void parallel(int64_t n, int threads, const std::function<void(int64_t, int64_t)>& task);

}  // namespace oldsgd
