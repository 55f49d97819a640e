#include "progress.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace oldsgd {
namespace {

using Clock = std::chrono::steady_clock;

double now_s() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

void sleep_s(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Small messages are done in microseconds: test often at first, then less and less often.
constexpr double kFirstSleep = 50e-6;
// While a caller waits, nothing of this rank computes: test more often than the period. Each later
// pause is 5% longer: no wait grows by more than 5%, and a long one costs no core.
constexpr double kWaitedForSleep = 200e-6;
constexpr double kWaitedForGrowth = 1.05;

double next_pause(double pause, bool waited_for, double period_s) {
  const double growth = waited_for && pause >= kWaitedForSleep ? kWaitedForGrowth : 2;
  return std::min(growth * pause, period_s);
}

// dst += src is the mixing op with weights 1 and 1.
void add(const Stage& s) {
  Mix m;
  m.model = m.wire = s.add_dtype;
  m.n = s.add_count;
  m.out = s.add_dst;
  m.y_self = s.add_dst;
  m.neighbours = {s.add_src};
  m.weights = {1.0, 1.0};
  mix_cpu(m, 1);
}

}  // namespace

Engine::Engine(uintptr_t startall, uintptr_t testall, size_t request_bytes, size_t status_bytes,
               double period_s, bool threaded)
    : startall_(reinterpret_cast<Start>(startall)),
      testall_(reinterpret_cast<Test>(testall)),
      request_bytes_(request_bytes),
      status_bytes_(status_bytes),
      period_s_(period_s) {
  if (!startall || !testall) throw std::invalid_argument("the addresses of MPI_* are missing");
  if (threaded) thread_ = std::thread([this] { loop(); });
}

Engine::~Engine() { stop(); }

std::shared_ptr<Job> Engine::submit(std::vector<Stage> stages) {
  auto job = std::make_shared<Job>();
  job->stages = std::move(stages);
  for (const Stage& s : job->stages)
    job->statuses.resize(std::max(job->statuses.size(), s.count * status_bytes_));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    open_.push_back(job);
  }
  if (thread_.joinable())
    wake_.notify_one();
  else
    pass();  // at least the messages are posted now
  return job;
}

bool Engine::wait(const Job& job, double timeout_s) {
  const auto until = Clock::now() + std::chrono::duration<double>(timeout_s);
  std::unique_lock<std::mutex> lock(mutex_);
  if (job.done) return true;  // waking the thread would only cost the caller its core
  if (thread_.joinable()) {
    ++waiters_;
    wake_.notify_one();
    finished_.wait_until(lock, until, [&] { return job.done.load(); });
    --waiters_;
    return job.done;
  }
  double pause = kFirstSleep;
  while (!job.done && Clock::now() < until) {
    lock.unlock();
    if (!pass()) {
      sleep_s(pause);
      pause = next_pause(pause, true, period_s_);
    }
    lock.lock();
  }
  return job.done;
}

void Engine::enter(uintptr_t function, uintptr_t argument) {
  std::lock_guard<std::mutex> lock(mutex_);
  enter_ = reinterpret_cast<Enter>(function);
  enter_argument_ = reinterpret_cast<void*>(argument);
}

void Engine::poll() {
  if (!thread_.joinable()) pass();
}

void Engine::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// Moves a job as far as it goes without waiting. True if a stage was finished.
bool Engine::advance(Job& job) {
  bool moved = false;
  while (job.at < job.stages.size() && !job.error) {
    Stage& s = job.stages[job.at];
    if (!job.started) {
      job.started = true;
      const int sends = s.count - s.receives;
      if (s.start && s.receives) job.error = startall_(s.receives, s.requests);
      if (s.start && sends && !job.error)
        job.error = startall_(sends, s.requests + s.receives * request_bytes_);
      if (job.error) break;
    }
    int all_done = 1;
    if (s.count) job.error = testall_(s.count, s.requests, &all_done, job.statuses.data());
    if (job.error || !all_done) break;
    if (s.add_count) add(s);
    ++job.at;
    job.started = false;
    moved = true;
  }
  return moved;
}

// Advances every open job once. True if a stage was finished.
bool Engine::pass() {
  std::deque<std::shared_ptr<Job>> jobs;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs = open_;
  }
  bool moved = false;
  for (auto& job : jobs) {
    moved |= advance(*job);
    if (job->at < job->stages.size() && !job->error) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    job->done_s = now_s();
    job->done = true;
    open_.erase(std::find(open_.begin(), open_.end(), job));
    finished_.notify_all();
  }
  return moved;
}

void Engine::loop() {
  double pause = kFirstSleep;
  size_t known = 0;
  bool waited_for = false;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    // Idle costs nothing: the thread sleeps until there is a job.
    wake_.wait(lock, [&] { return stopping_ || !open_.empty(); });
    if (stopping_) return;
    if (open_.size() != known) pause = kFirstSleep;
    const Enter enter = std::exchange(enter_, nullptr);
    lock.unlock();
    if (enter) enter(enter_argument_);
    const bool moved = pass();
    lock.lock();
    known = open_.size();
    if (moved) {
      pause = kFirstSleep;
      continue;
    }
    if (waiters_ && !waited_for) pause = std::min(pause, kWaitedForSleep / 2);
    waited_for = waiters_ > 0;
    pause = next_pause(pause, waited_for, period_s_);
    wake_.wait_for(lock, std::chrono::duration<double>(pause),
                   [&] { return stopping_ || open_.size() != known; });
  }
}

}  // namespace oldsgd
