#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
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

class Pool {
 public:
  bool run(int64_t n, int threads, const std::function<void(int64_t, int64_t)>& task) {
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
      n_ = n, threads_ = threads, task_ = &task, rounding_ = get_rounding();
      pending_ = threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    share(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return pending_ == 0; });
    return true;
  }

 private:
  int64_t bound(int k) const { return n_ / threads_ * k + std::min<int64_t>(k, n_ % threads_); }
  void share(int k) const { (*task_)(bound(k), bound(k + 1)); }

  void work(int k) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (k >= threads_) continue;
      lock.unlock();
      set_rounding(rounding_);
      share(k);
      lock.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  int started_ = 0, threads_ = 0, pending_ = 0;
  int64_t n_ = 0;
  Rounding rounding_ = 0;
  uint64_t generation_ = 0;
  const std::function<void(int64_t, int64_t)>* task_ = nullptr;
};

// Never destroyed: at exit the workers still wait in it. A forked child has no workers and maybe a
// locked mutex, so it starts afresh and forgets the parent's pool.
Pool* pool = nullptr;

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

}  // namespace

void parallel(int64_t n, int threads, const std::function<void(int64_t, int64_t)>& task) {
  if (n < threads) threads = static_cast<int>(n);
  if (threads <= 1 || !the_pool().run(n, threads, task)) task(0, n);
}

}  // namespace oldsgd
