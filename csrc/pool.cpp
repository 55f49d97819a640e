#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace oldsgd {
namespace {

// Flush-to-zero is set per thread; the workers take the caller's, so that the bits agree.
#ifdef __SSE__
using Rounding = unsigned;
Rounding get_rounding() { return _mm_getcsr(); }
void set_rounding(Rounding r) { _mm_setcsr(r); }
#else
using Rounding = int;
Rounding get_rounding() { return 0; }
void set_rounding(Rounding) {}
#endif

using Task = std::function<void(int64_t, int64_t)>;

constexpr int64_t kSharesEach = 8;  // so that a thread that comes late holds up nobody

// [0, n) in shares that threads take until none is left.
class Shares {
 public:
  Shares(int64_t n, int threads, const Task& task)
      : n_(n), share_(std::max<int64_t>(1, n / (threads * kSharesEach))), task_(task) {}

  void take() {
    const Rounding own = get_rounding();  // a thread of torch's keeps it
    set_rounding(rounding_);
    try {
      for (int64_t at; (at = next_.fetch_add(share_)) < n_;) task_(at, std::min(at + share_, n_));
    } catch (...) {  // the caller's, once nobody uses its task any more
      next_ = n_;
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = std::current_exception();
    }
    set_rounding(own);
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const int64_t n_, share_;
  const Task& task_;
  const Rounding rounding_ = get_rounding();
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

class Pool {
 public:
  // False if another thread uses the pool, or none can be started.
  bool run(Shares& shares, int threads) {
    std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
    if (!busy.owns_lock()) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      try {
        for (; started_ < threads - 1; ++started_)
          std::thread(&Pool::work, this, started_ + 1).detach();
      } catch (const std::system_error&) {  // no more threads to be had
        return false;
      }
      threads_ = threads, shares_ = &shares;
      ++generation_;
    }
    wake_.notify_all();
    shares.take();
    std::unique_lock<std::mutex> lock(mutex_);
    shares_ = nullptr;  // who has not woken up by now is not needed
    done_.wait(lock, [this] { return active_ == 0; });
    return true;
  }

 private:
  void work(int k) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      Shares* shares = shares_;
      if (!shares || k >= threads_) continue;
      ++active_;
      lock.unlock();
      shares->take();
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  int started_ = 0, threads_ = 0, active_ = 0;
  uint64_t generation_ = 0;
  Shares* shares_ = nullptr;
};

// Never destroyed: at exit the workers still wait in it. A forked child has no workers and maybe a
// locked mutex, so it starts afresh and forgets the parent's pool, and its team.
Pool* pool = nullptr;
std::atomic<Team> team{nullptr};

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] {
      pool = new Pool;
      team = nullptr;
    });
  });
  return *pool;
}

}  // namespace

void join_team(Team entry) {
  the_pool();  // for what it does at a fork
  team = entry;
}

void parallel(int64_t n, int threads, const Task& task) {
  Shares shares(n, threads, task);
  if (const Team of_openmp = team) {
    of_openmp([](void* s) { static_cast<Shares*>(s)->take(); }, &shares, threads, 0);
  } else if (!the_pool().run(shares, threads)) {
    shares.take();
  }
  shares.rethrow();
}

}  // namespace oldsgd
