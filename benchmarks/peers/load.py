"""What is trained: an emulated gradient (sleep, spin), or VGG11 on batches shaped like CIFAR-10.

The emulated model hands its gradients out layer by layer, as a real backward pass does: a third of
the time is the forward pass, the rest is spread over the layers. Its optimizer does nothing, since
the local step is the same for everybody; VGG11 takes real SGD steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hpc_oldsgd.bench.overhead import vgg11

Kind = Literal["sleep", "spin", "vgg11"]
LAYERS = 8
FORWARD = 1 / 3  # of a gradient's time
SPIN_SIDE = 64  # many small products, as a model of many small ops


class Load:
    """A model, its optimizer and its loss, fresh for every contestant."""

    clip: float | None = None  # limit on the norm of a gradient

    def __init__(self, kind: Kind, elements: int, grad_s: float, rank: int) -> None:
        self.kind, self.elements, self.grad_s, self.rank = kind, elements, grad_s, rank
        self.products = 0  # of a spinning gradient; `calibrate` finds them
        self.batch = 8
        self.at_once = False
        self.fresh()

    def fresh(self) -> None:
        torch.manual_seed(0)
        if self.real:
            self.model: nn.Module = vgg11()
            self._images = torch.randn(self.batch, 3, 32, 32)
            self._labels = torch.arange(self.batch) % 10
        else:
            self.model = Emulated(self)
            with torch.no_grad():
                for p in self.model.parameters():
                    p.fill_(self.rank)
        self.optimizer = self.make_optimizer(self.model.parameters())

    def make_optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return (torch.optim.SGD if self.real else NoStep)(parameters, lr=1e-3)

    @property
    def real(self) -> bool:
        """Gradients are cleared, models start alike; the emulated one has none of it."""
        return self.kind == "vgg11"

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def gradient(self, model: nn.Module | None = None) -> None:
        """The forward and backward pass, through `model` where a contestant wraps ours."""
        model = self.model if model is None else model
        if self.real:
            nn.functional.cross_entropy(model(self._images), self._labels).backward()
        else:
            model(torch.zeros((), requires_grad=True)).backward()

    def zero_grad(self) -> None:
        # The emulated gradient adds zeros: clearing it would cost memory traffic for nothing.
        if self.real:
            self.optimizer.zero_grad()

    def calibrate(self, together: Callable[[Callable[[], None]], float]) -> None:
        """Products that take grad_s while all ranks compute; `together` times a call so."""
        if self.kind != "spin":
            return
        seconds, count = 0.0, 1
        while seconds < min(0.1, self.grad_s):
            count *= 2
            seconds = together(lambda count=count: spin(count))  # type: ignore[misc]
        self.products = max(LAYERS, round(count * self.grad_s / seconds))


class Pace:
    """Passes the time of one gradient in portions, from its start to a given part of it."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.start = time.perf_counter()
        self.spun = 0

    def until(self, part: float) -> None:
        if self.load.kind == "spin":
            target = round(part * self.load.products)
            spin(target - self.spun)
            self.spun = target
        else:  # to a point in time: what the layer's own work took is part of the gradient
            time.sleep(max(0.0, self.start + part * self.load.grad_s - time.perf_counter()))


class Emulated(nn.Module):
    """Equal layers whose passes take their time and compute nothing."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.load = load
        sizes = [load.elements // LAYERS] * LAYERS
        sizes[0] += load.elements % LAYERS
        self.layers = nn.ParameterList(nn.Parameter(matrix(size)) for size in sizes)
        for p in self.layers:
            p.grad = torch.zeros_like(p)

    def forward(self, x: Tensor) -> Tensor:
        pace = Pace(self.load)
        for k, p in enumerate(self.layers):
            x = Layer.apply(x, p, pace, k)
        pace.until(FORWARD)
        return x


def matrix(size: int) -> Tensor:
    """As square as its size allows: PowerSGD leaves vectors as they are."""
    rows = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
    return torch.zeros(rows, size // rows)


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, pace: Pace, k: int) -> Tensor:
        ctx.shape, ctx.pace, ctx.k = p.shape, pace, k
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        done = (LAYERS - ctx.k) / LAYERS  # the last layer comes first
        if ctx.pace.load.at_once:  # nothing is ready before everything is
            done = 1.0
        ctx.pace.until(FORWARD + (1 - FORWARD) * done)
        return grads[0], torch.zeros(1, 1).expand(ctx.shape), None, None


class NoStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def spin(times: int) -> None:
    for _ in range(times):
        torch.mm(_SPIN_A, _SPIN_A, out=_SPIN_B)


_SPIN_A = torch.rand(SPIN_SIDE, SPIN_SIDE)
_SPIN_B = torch.empty_like(_SPIN_A)
