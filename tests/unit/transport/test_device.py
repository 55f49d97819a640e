"""What stands between the transport and a GPU, as far as it runs without one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.ops import native
from hpc_oldsgd.training.losses import Losses
from hpc_oldsgd.transport.device import Gpu, Host, device_of, driver_context
from hpc_oldsgd.transport.late_number import LateNumber
from support.late_device import LateDevice

ADDRESS = 0x7F00_0000_1000  # of a context


class Driver:
    """CUDA's driver: two devices, the second with a context at ADDRESS."""

    def __init__(self, fails: int = 0) -> None:
        self.cuInit = lambda flags: fails
        self.cuCtxSetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda context: 0)

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal + 10
        return 0 if ordinal < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        context._obj.value = ADDRESS if device.value == 11 else 1
        return 0


def test_the_context_of_a_native_thread() -> None:
    driver = Driver()
    function = ctypes.cast(driver.cuCtxSetCurrent, ctypes.c_void_p).value
    assert driver_context(1, driver) == (function, ADDRESS)
    assert driver_context(2, driver) is None  # no such device
    assert driver_context(0, Driver(fails=100)) is None
    assert driver_context(0, object()) is None  # no driver of CUDA's


def test_devices_by_their_type() -> None:
    assert isinstance(device_of(torch.device("cpu")), Host)
    assert isinstance(device_of(torch.device("cuda", 0)), Gpu)
    with LateDevice() as late:
        assert device_of(torch.device("cuda", 0)) is late


@pytest.mark.parametrize(
    ("built", "runs", "lacks"),
    [
        (
            "75-real 80-real 86-real 90",
            [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)],
            [(7, 0)],
        ),
        ("70-real 80-real 90", [(7, 0), (7, 5), (8, 6)], [(6, 1)]),
        ("80", [(8, 0), (8, 6), (9, 0)], [(7, 5)]),
        ("80-real 86", [(8, 0), (8, 6), (9, 0)], [(7, 0), (3, 7)]),
    ],
)
def test_kernels_are_chosen_by_compute_capability(
    built: str, runs: list[tuple[int, int]], lacks: list[tuple[int, int]]
) -> None:
    assert [native.no_code_for(capability, built) for capability in runs] == [""] * len(runs)
    for capability in lacks:
        why = native.no_code_for(capability, built)
        assert why.endswith(f"this one has {capability[0]}.{capability[1]}")


@pytest.mark.skipif(native.extension is None, reason="not built")
def test_a_mix_of_many_neighbours_is_refused_in_a_cuda_graph() -> None:
    native.check_captured(False, 65)
    with pytest.raises(UserError, match="a CUDA graph cannot hold a mix of 65 neighbours"):
        native.check_captured(True, 65)


def test_losses_of_a_device_are_read_a_round_late() -> None:
    """Whoever reads them never waits for the round that has just been enqueued."""
    read: list[float] = []
    with LateDevice() as device:
        losses = Losses(torch.device("cpu"), lambda j, loss: read.append(loss))
        assert losses.late == 1
        for r in range(3):
            for k in range(2):
                x = torch.full((4,), 2.0 * r + k)
                losses.note(0, LateNumber(x.mean()))
            before = device.training.done
            losses.boundary()
            assert read == [float(v) for v in range(2 * r)]
            assert r == 0 or before < device.training.done < device.training.enqueued
        losses.read_all()
    assert read == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_losses_of_the_host_are_read_at_once() -> None:
    read: list[tuple[int, float]] = []
    losses = Losses(torch.device("cpu"), lambda j, loss: read.append((j, loss)))
    losses.note(1, LateNumber(torch.tensor(0.5)))
    losses.note(0, 2.5)
    assert read == [(1, 0.5), (0, 2.5)] and losses.late == 0
