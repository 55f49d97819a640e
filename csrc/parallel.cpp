#include "parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <exception>
#include <mutex>

namespace oldsgd {
namespace {

using Task = std::function<void(int64_t, int64_t)>;

constexpr int64_t kSharesEach = 8;  // several per thread: a late thread does not delay the others

// [0, n) in shares that threads take until none is left.
class Shares {
 public:
  Shares(int64_t n, int threads, const Task& task)
      : n_(n), share_(std::max<int64_t>(1, n / (threads * kSharesEach))), task_(task) {
    std::fegetenv(&callers_);
  }

  void take() {
    // Flush-to-zero is set per thread: all use the caller's setting, so that the bits agree.
    std::fenv_t own;
    std::fegetenv(&own);
    std::fesetenv(&callers_);
    try {
      for (int64_t at; (at = next_.fetch_add(share_)) < n_;) task_(at, std::min(at + share_, n_));
    } catch (...) {  // rethrown in the caller, once no thread uses its task any more
      next_ = n_;
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = std::current_exception();
    }
    std::fesetenv(&own);  // the thread is torch's
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const int64_t n_, share_;
  const Task& task_;
  std::fenv_t callers_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

std::atomic<Team> team{nullptr};

}  // namespace

void join_team(Team entry) {
  static const int at_fork = pthread_atfork(nullptr, nullptr, [] { team = nullptr; });
  team = at_fork == 0 ? entry : nullptr;
}

void parallel(int64_t n, int threads, const Task& task) {
  const Team of_torch = team;
  if (threads <= 1 || !of_torch) return task(0, n);
  Shares shares(n, threads, task);
  of_torch([](void* s) { static_cast<Shares*>(s)->take(); }, &shares, threads, 0);
  shares.rethrow();
}

}  // namespace oldsgd
