"""Does a message hide behind a real kernel? Products of matrices in the place of a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...algorithms import OLDSGD
from ...bench import overlap
from ...transport.device import device_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...transport.mpi import MpiTransport

TAU, ROUNDS = 2, 6
ROOM = 1.2  # tau gradients take this many times as long as a message
LEAST_S = 0.01  # of a gradient
SIDE_ON_GPU, SIDE_ON_CPU = 2048, 128


class KernelGradient(overlap.Gradient):
    """Is only enqueued on a GPU, as a backward pass is; on the CPU it computes at once."""

    def __init__(
        self, options: overlap.Options, transport: MpiTransport, device: torch.device
    ) -> None:
        self._device = device_of(device)
        side = options.spin_size
        self._m = torch.full((side, side), 1.0 / side, device=device)
        self._out = torch.empty_like(self._m)
        self.waits = True
        """While it is measured alone."""
        super().__init__(options, transport)

    def _spin(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._m, self._m, out=self._out)
        if self.waits:
            self._device.synchronize()


def measure(
    made: Callable[[], MpiTransport], device: torch.device, nbytes: int, t_c: float
) -> dict[str, Any]:
    """OLDSGD with tau = 2: a round, and what its compute and its message take alone. Collective."""
    on_gpu = device.type == "cuda"
    options = overlap.Options(
        tau=TAU, grad_seconds=max(LEAST_S, ROOM * t_c / TAU), load="spin", rounds=ROUNDS,
        spin_size=SIDE_ON_GPU if on_gpu else SIDE_ON_CPU, model_bytes=nbytes,
        device="cuda" if on_gpu else "cpu",
    )  # fmt: skip
    idle = made()
    gradient = KernelGradient(options, idle, device)
    t_g = overlap.gradient_alone(idle, gradient)
    idle.close()
    gradient.waits = False
    result = overlap.measure(options, OLDSGD(tau=TAU), made(), gradient, t_g, t_c)
    return {
        "bytes": nbytes,
        "compute_s": TAU * t_g,
        "message_s": t_c,
        "round_s": result["round_s"],
        "ratio": result["ratio_to_ideal"],
    }
