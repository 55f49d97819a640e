// A thread that moves MPI messages while Python computes.
//
// MPI moves large messages only during calls to it. This engine tests the open requests and
// sleeps about a millisecond, which hides a transfer for a few percent of a core. It needs no MPI
// header: the addresses of MPI_Startall and MPI_Testall and the sizes of a request and a status
// fit every MPI.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "mix.h"

namespace oldsgd {

// One step of a job: start the requests (receives first), test until all are done, dst += src.
struct Stage {
  char* requests = nullptr;  // receives, then sends; owned by the caller until the job is done
  int receives = 0;
  int count = 0;
  bool start = true;  // false: the caller has started them
  void* add_dst = nullptr;
  const void* add_src = nullptr;
  int64_t add_count = 0;
  Dtype add_dtype = Dtype::f32;
};

struct Job {
  std::vector<Stage> stages;
  std::vector<char> statuses;  // room for MPI's, never read
  size_t at = 0;
  bool started = false;
  int error = 0;                  // what MPI returned, 0 if all is well
  double done_s = 0;              // on the clock of time.perf_counter
  std::atomic<bool> done{false};  // asked without the lock; what is above is then final
};

class Engine {
 public:
  Engine(uintptr_t startall, uintptr_t testall, size_t request_bytes, size_t status_bytes,
         double period_s, bool threaded);
  ~Engine();

  std::shared_ptr<Job> submit(std::vector<Stage> stages);
  // True once the job is done. Without a thread the caller moves all open jobs meanwhile.
  bool wait(const Job& job, double timeout_s);
  // The thread calls function(argument) before its next job: cuCtxSetCurrent and a context, so that
  // an MPI with CUDA finds a device there. Without a thread the callers have theirs.
  void enter(uintptr_t function, uintptr_t argument);
  void poll();  // one pass over the open jobs, for callers without a thread
  void stop();  // ends the thread; open jobs stay as they are

 private:
  bool advance(Job& job);
  bool pass();
  void loop();

  using Start = int (*)(int, void*);
  using Test = int (*)(int, void*, int*, void*);
  using Enter = int (*)(void*);
  Start startall_;
  Test testall_;
  size_t request_bytes_, status_bytes_;
  double period_s_;
  Enter enter_ = nullptr;  // until the thread has called it
  void* enter_argument_ = nullptr;
  std::mutex mutex_;  // open_, enter_ and the flags
  std::condition_variable wake_, finished_;
  std::deque<std::shared_ptr<Job>> open_;
  int waiters_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace oldsgd
