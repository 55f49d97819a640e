// Splits a pass over memory between torch's own threads.
#pragma once

#include <cstdint>
#include <functional>

namespace oldsgd {

// GOMP_parallel, the entry of the OpenMP library that torch has loaded: runs a function on a team
// of threads, the caller among them.
using Team = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

// Sets the team that `parallel` uses; null: none. There are no threads of our own. Torch's threads
// spin for milliseconds after each of torch's operations, so others would find no free core.
void join_team(Team entry);

// Runs task(begin, end) over [0, n) in contiguous shares, on at most `threads` threads, the caller
// among them; returns when all are done. The caller does all the work for threads = 1, without a
// team, and in a forked child, which does not inherit the team's threads.
void parallel(int64_t n, int threads, const std::function<void(int64_t, int64_t)>& task);

}  // namespace oldsgd
