"""A step size that grows linearly over the first iterations, for many agents with large steps."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.sgd import Optimizer


class Warmup:
    """Changes alpha between rounds only: K-GT and the gradient form compute with one a round."""

    def __init__(self, optimizers: Sequence[Optimizer], iterations: int) -> None:
        self.optimizers, self.iterations = optimizers, iterations
        self.alphas = [[float(group["lr"]) for group in o.param_groups] for o in optimizers]

    def before_round(self, t: int, tau: int) -> None:
        """t iterations are done; the round takes the alpha of its last step."""
        if not self.iterations:
            return
        share = min(1.0, (t + tau) / self.iterations)
        # Looked up each time: torch puts other groups in place when it loads a state.
        for optimizer, alphas in zip(self.optimizers, self.alphas, strict=True):
            for group, alpha in zip(optimizer.param_groups, alphas, strict=True):
                group["lr"] = alpha * share
