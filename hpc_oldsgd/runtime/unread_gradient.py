"""What a schedule with `reads_gradient = False` is handed in place of a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UserError


class _Unread(Tensor):
    """`descend` takes it; torch refuses everything else that is done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UserError(
            "the schedule computes with the gradient, but reads_gradient=False says that it only "
            "passes it to descend(): leave reads_gradient out of the algorithm"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return "UNREAD"


UNREAD: Tensor = torch.empty(0).as_subclass(_Unread)
