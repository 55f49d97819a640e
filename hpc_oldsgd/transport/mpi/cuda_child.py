"""Run in a process of its own: does this MPI survive a pointer to device memory?

An MPI may crash on one, or wait for ever, although it says that it is CUDA-aware. Here that costs
nobody anything. The way is that of a run: persistent requests, started and tested by a thread. The
message goes from this process to itself. No torch: with it the start would take seconds.

    python cuda_child.py cuda:0       prints "intact" if the payload came back as it was
    python cuda_child.py host         the same with host memory, and `unmapped` with none: for tests
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

NBYTES = 1 << 20
CHILD_LIMIT_S = 60.0
INTACT = "intact"
LAUNCHER = ("PMI", "PRTE", "HYDI", "HYDRA", "MPI_LOCAL", "OMPI_COMM", "SLURM_", "PALS_")
"""Variables by which MPI would take the child for a rank of the job."""


def why_not(memory: str, limit_s: float = CHILD_LIMIT_S) -> str:
    """Empty if MPI moved such memory in a child process; else what happened to the child."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER)}
    command = [sys.executable, str(Path(__file__).resolve()), memory]
    try:
        ran = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"a trial did not end within {limit_s:g} s"
    except OSError as error:
        return f"a trial did not start: {error}"
    if ran.returncode == 0 and ran.stdout.strip().endswith(INTACT):
        return ""
    if ran.returncode < 0:
        return f"a trial ended with {signal.Signals(-ran.returncode).name}"
    last = (ran.stderr or ran.stdout).strip().splitlines()[-1:]
    return f"a trial failed: {''.join(last) or f'exit code {ran.returncode}'}"


class Cuda:
    """Two buffers on a device, by CUDA's driver."""

    def __init__(self, ordinal: int) -> None:
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter_thread()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise OSError(code, f"CUDA refuses {name}")

    def enter_thread(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def make(self, content: bytes) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(content)))
        self._call("cuMemcpyHtoD_v2", address, content, ctypes.c_size_t(len(content)))
        return address.value

    def read(self, address: int) -> bytes:
        content = ctypes.create_string_buffer(NBYTES)
        source = ctypes.c_uint64(address)
        self._call("cuMemcpyDtoH_v2", content, source, ctypes.c_size_t(NBYTES))
        return content.raw


class Host:
    def __init__(self) -> None:
        self._kept: list[Any] = []

    def enter_thread(self) -> None: ...

    def make(self, content: bytes) -> int:
        self._kept.append(ctypes.create_string_buffer(content, len(content)))
        return ctypes.addressof(self._kept[-1])

    def read(self, address: int) -> bytes:
        return ctypes.string_at(address, NBYTES)


class Unmapped(Host):
    """As a device's address looks to an MPI that knows nothing of devices."""

    def make(self, content: bytes) -> int:
        return 0x10_0000


def main(memory: str) -> None:
    from mpi4py import MPI

    kind, _, ordinal = memory.partition(":")
    makers: dict[str, Callable[[], Any]] = {"host": Host, "unmapped": Unmapped}
    device = Cuda(int(ordinal)) if kind == "cuda" else makers[kind]()
    payload = os.urandom(NBYTES)
    source, target = device.make(payload), device.make(bytes(NBYTES))

    def move() -> None:
        device.enter_thread()
        comm = MPI.COMM_SELF
        received, sent = (
            [MPI.buffer.fromaddress(address, NBYTES), MPI.BYTE] for address in (target, source)
        )
        requests = [comm.Recv_init(received, 0), comm.Send_init(sent, 0)]
        MPI.Prequest.Startall(requests)
        while not MPI.Request.Testall(requests):
            pass

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    print(INTACT if device.read(target) == payload else "damaged", flush=True)
    os._exit(0)  # the end of MPI is no part of the question


if __name__ == "__main__":
    main(sys.argv[1])
