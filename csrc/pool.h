// The threads that share a pass over memory. One thread asked for: none of this is touched.
#pragma once

#include <cstdint>
#include <functional>

namespace oldsgd {

// GOMP_parallel, the entry of the OpenMP library that torch has loaded: runs a function on a team
// of threads, the caller among them.
using Team = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

// From now on `parallel` uses torch's own threads. They spin for milliseconds after each of torch's
// operations: threads of ours would find their cores taken. Null: a small pool of our own again.
void join_team(Team entry);

// Runs task(begin, end) over [0, n) in contiguous shares that at most `threads` threads take, the
// caller among them; returns when all are done. While another thread of this process uses our own
// pool, the caller does all the work itself. Safe after fork: the child starts threads of its own.
void parallel(int64_t n, int threads, const std::function<void(int64_t, int64_t)>& task);

}  // namespace oldsgd
