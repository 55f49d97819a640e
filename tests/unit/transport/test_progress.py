"""The progress engines, native and Python, on requests that this file completes by hand.

The native engine takes the addresses of two C functions; here they are callbacks of this file
instead of MPI's, so every order of events can be made to happen.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_oldsgd import ops
from hpc_oldsgd.transport import progress
from hpc_oldsgd.transport.progress import Engine, NativeEngine, PythonEngine, Stage

START = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
ENTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
TEST = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p
)


class Network:
    """Requests are numbers; `arrive(k)` completes request k."""

    def __init__(self) -> None:
        self.here: set[int] = set()
        self.log: list[str] = []
        self.error = 0
        self.on_test: Callable[[], None] = lambda: None
        self.startall, self.testall = START(self._startall), TEST(self._testall)

    def arrive(self, *numbers: int) -> None:
        self.here.update(numbers)

    def numbers(self, address: int, count: int) -> list[int]:
        return list((ctypes.c_int * count).from_address(address))

    def _startall(self, count: int, address: int) -> int:
        self.log += [f"start {k}" for k in self.numbers(address, count)]
        return self.error

    def _testall(self, count: int, address: int, flag: ctypes.Array, _: int) -> int:
        self.on_test()
        flag[0] = int(self.here.issuperset(self.numbers(address, count)))
        return self.error


class Requests:
    def __init__(self, network: Network, receives: list[int], sends: list[int]) -> None:
        self.network, self.all = network, [*receives, *sends]
        self._array = (ctypes.c_int * max(1, len(self.all)))(*self.all)
        self.native = (ctypes.addressof(self._array), len(receives), len(self.all))

    def start(self) -> None:
        self.network.log += [f"start {k}" for k in self.all]

    def test(self) -> bool:
        self.network.on_test()
        if self.network.error:
            raise RuntimeError(f"MPI error {self.network.error}")
        return self.network.here.issuperset(self.all)


KINDS = [
    pytest.param(
        (native, threaded),
        id=f"{'native' if native else 'python'}-{'thread' if threaded else 'poll'}",
        marks=pytest.mark.skipif(native and not ops.native_available(), reason="not built"),
    )
    for native in (True, False)
    for threaded in (True, False)
]


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, network: Network) -> Iterator[Engine]:
    native, threaded = request.param
    engine: Engine
    if native:
        addresses = {
            "MPI_Startall": ctypes.cast(network.startall, ctypes.c_void_p).value or 0,
            "MPI_Testall": ctypes.cast(network.testall, ctypes.c_void_p).value or 0,
        }
        engine = NativeEngine(addresses, (ctypes.sizeof(ctypes.c_int), 16), threaded)
    else:
        engine = PythonEngine(threaded)
    yield engine
    network.arrive(*range(100))
    engine.stop()


def settle(engine: Engine, network: Network, log: list[str]) -> None:
    """Until the engine has started these, however busy the machine; then a little longer."""
    until = time.perf_counter() + 20
    while network.log != log and time.perf_counter() < until:
        engine.poll()
        time.sleep(0.003)
    time.sleep(0.01)
    engine.poll()
    assert network.log == log


def test_a_job_starts_receives_first_and_is_done_when_all_is_here(engine, network):
    requests = Requests(network, receives=[1, 2], sends=[3, 4])
    job = engine.submit([Stage(requests)])
    settle(engine, network, ["start 1", "start 2", "start 3", "start 4"])
    network.arrive(1, 2, 3)
    assert not engine.wait(job, 0.02) and not job.done
    network.arrive(4)
    before = time.perf_counter()
    assert engine.wait(job, 10) and job.done and not job.error
    assert before - 1 < job.done_s <= time.perf_counter()


class Context:
    """Notes which threads make it theirs, in Python or natively."""

    def __init__(self, log: list[str]) -> None:
        self.threads: list[int] = []
        self.log = log
        self._function = ENTER(self._enter)

    def _enter(self, argument: int) -> int:
        assert argument == 42
        self.make_current()
        return 0

    def make_current(self) -> None:
        self.threads.append(threading.get_ident())
        self.log.append("enter")

    def native_context(self) -> tuple[int, int]:
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0, 42


def test_the_thread_has_a_device_before_it_calls_mpi(engine, network):
    """Without a thread the caller has its own."""
    context: Any = Context(network.log)
    engine.work_with(context)
    entered = ["enter"] if engine.threaded else []
    requests = [Requests(network, [k], []) for k in (1, 2)]
    for each in requests:
        engine.submit([Stage(each)])
    settle(engine, network, [*entered, "start 1", "start 2"])
    assert threading.get_ident() not in context.threads


def test_stages_follow_each_other_and_add(engine, network):
    """As in the ring all-reduce: the second message leaves after the first was added."""
    total, incoming = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
    first, second = Requests(network, [1], []), Requests(network, [2], [])
    job = engine.submit([Stage(first, add=(total, incoming)), Stage(second)])
    settle(engine, network, ["start 1"])
    assert total.tolist() == [1, 2, 3]
    network.arrive(1)
    settle(engine, network, ["start 1", "start 2"])
    assert total.tolist() == [11, 22, 33]
    assert not job.done
    network.arrive(2)
    assert engine.wait(job, 10)


def test_jobs_end_in_any_order(engine, network):
    requests = [Requests(network, [k], []) for k in range(5)]
    jobs = [engine.submit([Stage(r)]) for r in requests]
    for k in (3, 0, 4, 1, 2):
        network.arrive(k)
        assert engine.wait(jobs[k], 10)
    assert all(job.done for job in jobs)


def test_started_and_empty_stages(engine, network):
    requests = Requests(network, [7], [])
    job = engine.submit([Stage(requests, start=False)])
    network.arrive(7)
    assert engine.wait(job, 10) and network.log == []
    assert engine.wait(engine.submit([Stage(Requests(network, [], []))]), 10)
    assert engine.wait(engine.submit([]), 10)


def test_an_error_reaches_the_waiting_thread(engine, network):
    requests = Requests(network, [1], [])
    network.error = 13
    job = engine.submit([Stage(requests)])
    try:
        assert engine.wait(job, 10)
        assert job.error == 13
    except RuntimeError as error:
        assert "MPI error 13" in str(error)


def test_many_jobs_from_many_threads(engine, network):
    if not engine.threaded:
        pytest.skip("without a thread, only one thread calls")
    network.arrive(*range(50))
    kept, failures = [], []

    def work() -> None:
        for k in range(50):
            requests = Requests(network, [k], [])
            kept.append(requests)
            if not engine.wait(engine.submit([Stage(requests)]), 20):
                failures.append(k)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(network.log) == 200


def cpu_seconds(tids: set[int]) -> float:
    """CPU time of threads of this process: their clocks are numbered as Linux does it."""
    return sum(time.clock_gettime((~tid << 3) | 6) for tid in tids)


def threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


@pytest.mark.parametrize("native", [True, False])
def test_an_idle_progress_thread_costs_nothing(native, network):
    """Under 2% of a core, before its first message and between messages."""
    if native and not ops.native_available():
        pytest.skip("not built")
    before = threads()
    engine: Engine = PythonEngine(True)
    if native:
        engine.stop()
        before = threads()
        addresses = {
            "MPI_Startall": ctypes.cast(network.startall, ctypes.c_void_p).value or 0,
            "MPI_Testall": ctypes.cast(network.testall, ctypes.c_void_p).value or 0,
        }
        engine = NativeEngine(addresses, (4, 16), True)
    own = threads() - before
    assert len(own) == 1
    for k in range(2):
        start_cpu, start = cpu_seconds(own), time.perf_counter()
        time.sleep(0.7)
        used = (cpu_seconds(own) - start_cpu) / (time.perf_counter() - start)
        assert used < 0.02
        requests = Requests(network, [k], [])
        job = engine.submit([Stage(requests)])
        network.arrive(k)
        assert engine.wait(job, 10)
    engine.stop()
    gone = time.perf_counter() + 10  # the system removes an ended thread when it gets to it
    while own & threads() and time.perf_counter() < gone:
        time.sleep(0.01)
    assert not own & threads()


def test_stop_leaves_open_jobs_alone(network):
    for threaded in (True, False):
        engine = PythonEngine(threaded)
        job = engine.submit([Stage(Requests(network, [1], []))])
        engine.stop()
        engine.stop()
        assert not job.done


def test_pauses_of_a_thread_that_is_waited_for() -> None:
    """About a twentieth of the wait so far, never longer than the period."""
    pause, waited, looks = progress.FIRST_SLEEP_S, 0.0, 0
    while waited < 1.0:
        waited += pause
        looks += 1
        pause = progress.next_pause(pause, True, progress.PERIOD_S)
        assert pause <= max(progress.WAITED_FOR_SLEEP_S, 0.1 * waited + 2e-4)
    assert pause == progress.PERIOD_S
    assert looks < 1100
    assert progress.next_pause(1e-4, False, 1e-3) == 2e-4
