// The C++ under a sanitizer: every kernel on buffers of exactly its size, `parallel` from several
// threads, the progress engine against an MPI of this file. Results are compared where two ways
// must agree; the sanitizer reports other errors.
#include "sanitized.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/parallel.h"
#include "../../csrc/progress.h"

using namespace oldsgd;

#ifdef OLDSGD_X86
// Not compiled here, for time: the test lets nobody choose it.
const Kernels& oldsgd::kernels_avx512() { return kernels_avx2(); }
#endif

std::vector<const Kernels*> oldsgd::instruction_sets() {
  std::vector<const Kernels*> sets = {&kernels_portable()};
#ifdef OLDSGD_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
    sets.push_back(&kernels_avx2());
#endif
  return sets;
}

namespace {

// One set of arguments; the bits are arbitrary, so there are NaN, infinities and subnormals too.
struct Case {
  Buffer out, y, acc, next;
  std::vector<Buffer> others;
  std::vector<const void*> neighbours;
  std::vector<double> weights;
  double distance = 0;

  Case(Dtype model, Dtype wire, int64_t n, int degree, int64_t shift)
      : out(n * size_of(model), shift * size_of(model), 1),
        y(n * size_of(wire), shift * size_of(wire), 2),
        acc(n * size_of(model), shift * size_of(model), 3),
        next(n * size_of(wire), shift * size_of(wire), 4) {
    others.reserve(static_cast<size_t>(degree));
    weights.push_back(0.25);
    for (int j = 0; j < degree; ++j) {
      others.emplace_back(n * size_of(wire), shift * size_of(wire), 5u + static_cast<unsigned>(j));
      neighbours.push_back(others.back().data());
      weights.push_back(0.75 / degree);
    }
  }

  Mix mix(int form, Dtype model, Dtype wire, int64_t n, bool all) {
    Mix m;
    m.form = form == 0 ? Form::gradient : Form::delta;
    m.model = model, m.wire = wire, m.n = n;
    m.out = out.data(), m.y_self = y.data();
    m.neighbours = neighbours, m.weights = weights;
    m.acc = form == 0 && all ? acc.data() : nullptr;
    m.zero_acc = m.acc != nullptr;
    m.alpha = 0.125;
    m.y_next = all ? next.data() : nullptr;
    m.distance = form == 2 ? &distance : nullptr;
    return m;
  }
};

// What an instruction set computes, straight through its table, with stores past the cache too.
void run_kernel(const Kernels& k, const Mix& m, int form, bool stream) {
  std::vector<float> f(m.weights.begin() + 1, m.weights.end());
  std::vector<double> partials(static_cast<size_t>((m.n + kBlock - 1) / kBlock));
  const void* d = m.weights.data() + 1;
  const void* w = m.model == Dtype::f64 ? d : f.data();
  const auto* near = m.neighbours.data();
  const Work work{m.out,   m.y_self, near,     w,          m.degree(), m.weights[0],
                  m.alpha, m.acc,    m.y_next, m.zero_acc, stream,     stream && m.y_next};
  k.mix[static_cast<int>(m.model)][static_cast<int>(m.wire)][form](work, 0, m.n, partials.data());
  if (m.distance) {
    *m.distance = 0;
    for (double part : partials) *m.distance += part;
  }
}

template <class Error, class F>
bool throws(const F& f) {
  try {
    f();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void kernels() {
  const auto sets = instruction_sets();
  for (Dtype model : kTypes)
    for (Dtype wire : kTypes) {
      if (!wire_fits(model, wire)) continue;
      for (int64_t n : {0, 1, 15, 16, 33, 4096 + 19})
        for (int degree : {0, 1, 2, 3, 4, 7})
          for (int form = 0; form < 3; ++form)
            for (int how = 0; how < 4; ++how) {
              const bool all = how & 1, aligned = how & 2;
              const Case start(model, wire, n, degree, aligned ? 0 : 1);
              Case expected(start);
              // A copy of a case still points to the neighbours of the first, which only are read.
              mix_cpu(expected.mix(form, model, wire, n, all), 1);
              for (const Kernels* set : sets) {
                Case found(start);
                run_kernel(*set, found.mix(form, model, wire, n, all), form, aligned && form == 0);
                CHECK(found.out == expected.out && found.next == expected.next);
                CHECK(found.acc == expected.acc && same_bits(found.distance, expected.distance));
              }
            }
    }
}

void threads_agree() {
  const int64_t n = 40 * kBlock + 7;
  for (int form = 0; form < 3; ++form) {
    const Case start(Dtype::f32, Dtype::bf16, n, 3, 1);
    Case one(start), many(start);
    mix_cpu(one.mix(form, Dtype::f32, Dtype::bf16, n, true), 1);
    mix_cpu(many.mix(form, Dtype::f32, Dtype::bf16, n, true), 4);
    CHECK(one.out == many.out && one.next == many.next && one.acc == many.acc);
    CHECK(same_bits(one.distance, many.distance));
  }
  Buffer from(3 * 65536 + 5, 0, 1), to(3 * 65536 + 5, 0, 2), odd(3 * 65536 + 5, 1, 3);
  stream_copy(to.data(), from.data(), 3 * 65536 + 5, 3);
  stream_copy(odd.data(), to.data(), 3 * 65536 + 5, 2);
  CHECK(to == from && odd == from);
}

void rows() {
  for (int64_t d : {0, 1, 16, 100, 3 * 4096 + 5}) {
    const int64_t n = 5;
    std::vector<int64_t> indptr = {0, 1, 3, 3, 6, 7}, indices = {1, 0, 4, 0, 1, 2, 4};
    std::vector<double> w(7, 0.1), own(5, 0.5), distance(5);
    const Buffer y(n * d * 2, 0, 1), acc(n * d * 4, 0, 2);
    for (int form = 0; form < 3; ++form) {
      Buffer one(n * d * 4, 0, 3), many(one);
      for (Buffer* out : {&one, &many}) {
        MixRows m{};
        m.form = form == 0 ? Form::gradient : Form::delta;
        m.model = Dtype::f32, m.wire = Dtype::f16;
        m.rows = n, m.d = m.stride = d, m.edges = 7;
        m.out = out->data(), m.y = y.data();
        m.indptr = indptr.data(), m.indices = indices.data();
        m.weights = w.data(), m.self_weights = form == 0 ? own.data() : nullptr;
        m.acc = form == 0 ? acc.data() : nullptr;
        m.alpha = 0.5;
        m.distance = form == 2 ? distance.data() : nullptr;
        mix_rows_cpu(m, out == &one ? 1 : 3);
        for (auto& bad : {std::vector<int64_t>{1, 1, 3, 3, 6, 7}, {0, 9, 3, 3, 6, 7}}) {
          MixRows wrong = m;
          wrong.indptr = bad.data();
          CHECK(throws<std::invalid_argument>([&] { mix_rows_cpu(wrong, 1); }));
        }
      }
      CHECK(one == many);
    }
  }
}

// Several threads call `parallel` at once, with different numbers of threads.
void parallel_calls() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([caller] {
      for (int round = 0; round < 60; ++round) {
        std::vector<int> seen(97);
        parallel(97, 1 + (caller + round) % 5, [&](int64_t a, int64_t b) {
          for (; a < b; ++a) ++seen[static_cast<size_t>(a)];
        });
        for (int count : seen) CHECK(count == 1);
      }
    });
  for (auto& caller : callers) caller.join();
  // An error in a share reaches the caller, once no thread uses the task any more.
  for (int64_t bad : {0, 60, 96}) {
    const auto fail = [&](int64_t a, int64_t b) {
      if (a <= bad && bad < b) throw std::bad_alloc();
    };
    CHECK(throws<std::bad_alloc>([&] { parallel(97, 4, fail); }));
  }
}

// What OpenMP's entry does, with threads that a sanitizer can follow; some find nothing left to do.
std::atomic<int> teams{0};
void team(void (*work)(void*), void* data, unsigned threads, unsigned) {
  ++teams;
  std::vector<std::thread> others;
  for (unsigned k = 1; k < threads; ++k) others.emplace_back(work, data);
  work(data);
  for (auto& other : others) other.join();
}

void after_fork() {
  int64_t sum = 0;
  const int before = teams;
  const pid_t child = fork();
  if (child == 0) {
    std::mutex mutex;
    parallel(100, 3, [&](int64_t a, int64_t b) {
      std::lock_guard<std::mutex> lock(mutex);
      sum += b - a;
    });
    _exit(sum == 100 && teams == before ? 0 : 1);  // the parent's team is not used
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

// --- an MPI of one process: a request is a number, a network thread completes what is started ----

struct Network {
  std::mutex mutex;
  std::vector<int> left;  // tests until a request is through; -1: not started
  int fail_at = -1;       // the request whose start fails
} network;

int startall(int count, void* requests) {
  std::lock_guard<std::mutex> lock(network.mutex);
  for (int k = 0; k < count; ++k) {
    const int r = static_cast<int*>(requests)[k];
    if (r == network.fail_at) return 17;
    CHECK(network.left[static_cast<size_t>(r)] == -1);
    network.left[static_cast<size_t>(r)] = r % 4;
  }
  return 0;
}

int testall(int count, void* requests, int* flag, void* statuses) {
  std::lock_guard<std::mutex> lock(network.mutex);
  *flag = 1;
  for (int k = 0; k < count; ++k) {
    int& left = network.left[static_cast<size_t>(static_cast<int*>(requests)[k])];
    CHECK(left >= 0);
    if (left > 0) --left, *flag = 0;
  }
  if (*flag)
    for (int k = 0; k < count; ++k)
      network.left[static_cast<size_t>(static_cast<int*>(requests)[k])] = -1;
  std::memset(statuses, 1, static_cast<size_t>(count) * 24);  // MPI fills them all
  return 0;
}

uintptr_t address(int (*f)(int, void*)) { return reinterpret_cast<uintptr_t>(f); }
uintptr_t address(int (*f)(int, void*, int*, void*)) { return reinterpret_cast<uintptr_t>(f); }

void engine(bool threaded) {
  network.left.assign(64, -1);
  Engine engine(address(startall), address(testall), sizeof(int), 24, 1e-4, threaded);
  const auto talk = [&](int first) {  // one flight after the other on eight requests of its own
    std::vector<int> a = {first, first + 1, first + 2}, b = {first + 3, first + 4};
    std::vector<float> sum(1000, 1.0f), add(1000, 0.5f);
    for (int round = 0; round < 40; ++round) {
      Stage one, two, nothing;
      one.requests = reinterpret_cast<char*>(a.data());
      one.receives = 2, one.count = 3;
      one.add_dst = sum.data(), one.add_src = add.data();
      one.add_count = 1000, one.add_dtype = Dtype::f32;
      two.requests = reinterpret_cast<char*>(b.data());
      two.receives = 0, two.count = 2;
      const auto job = engine.submit({one, nothing, two});
      while (threaded && round % 3 == 0 && !job->done) std::this_thread::yield();  // as Python asks
      if (!threaded) engine.poll();
      while (!engine.wait(*job, 0.01)) continue;
      CHECK(job->done && job->error == 0 && job->done_s > 0);
      CHECK(sum[999] == 1.0f + 0.5f * static_cast<float>(round + 1));
    }
  };
  if (threaded) {
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller)
      callers.emplace_back([&, caller] { talk(8 * caller); });
    for (auto& caller : callers) caller.join();
  } else {
    talk(0);
  }
  // A start that MPI refuses ends its job alone.
  std::vector<int> bad = {40}, open = {43};
  network.fail_at = 40;
  Stage stage;
  stage.requests = reinterpret_cast<char*>(bad.data());
  stage.receives = stage.count = 1;
  const auto job = engine.submit({stage});
  while (!engine.wait(*job, 0.01)) continue;
  CHECK(job->error == 17);
  // Stopped with a job under way, which then is as it was.
  stage.requests = reinterpret_cast<char*>(open.data());
  engine.submit({stage});
  engine.stop();
  engine.stop();
}

}  // namespace

int main() {
  kernels();
  rows();
  join_team(team);
  parallel_calls();
  threads_agree();
  narrow_agrees();
  CHECK(teams > 0);
  engine(true);
  engine(false);
#ifndef __SANITIZE_THREAD__  // which does not follow a fork of a process with threads
  after_fork();
#endif
  std::puts("all done");
}
