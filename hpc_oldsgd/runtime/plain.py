"""Plain SGD on a bare x: for problems that are a gradient and no model."""

from __future__ import annotations

from torch import Tensor

from ..algorithms import Algorithm
from ..torch_private import add_to_all
from ..transport.base import Transport
from .runner import Runner
from .unread_gradient import UNREAD


class Plain(Runner):
    """x with plain SGD on it, (d,) or (n, d).

    `advance(g)` takes the gradient directly; `step()` takes what was last put into `g`.
    """

    def __init__(self, x: Tensor, algorithm: Algorithm, transport: Transport, alpha: float) -> None:
        super().__init__(x, algorithm, transport)
        self._alpha = alpha
        self.g = UNREAD
        self._rows = _rows(x)
        self._last_g: tuple[Tensor, list[Tensor]] | None = None

    def step(self) -> bool:
        return self.advance(self.g)

    def advance(self, g: Tensor) -> bool:
        self.g = g
        return super().advance(g)

    @property
    def alpha(self) -> float:
        return self._alpha

    def descend(self, g: Tensor) -> None:
        g = self.g if g is UNREAD else g
        # Agent by agent, as torch.optim.SGD does it: in one pass over (n, d) torch would fuse the
        # product into the sum for other elements, and the last bit would not be an Agent's.
        if self._last_g is None or self._last_g[0] is not g:
            self._last_g = g, _rows(g)  # of 1,000 agents the views take longer than the step
        add_to_all(self._rows, self._last_g[1], -self._alpha)


def _rows(x: Tensor) -> list[Tensor]:
    return list(x.unbind()) if x.dim() > 1 else [x]
