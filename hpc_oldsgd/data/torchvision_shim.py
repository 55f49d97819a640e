"""torchvision beside a torch of another build.

A CUDA build of torchvision next to a CPU build of torch cannot load its native library and fails to
import ("operator torchvision::nms does not exist"); so does transformers, which imports it. Models
and data sets need no native operator: declaring the two that the import looks up is enough.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError

_declared: list[Any] = []  # a Library takes its declarations back when it is collected


def prepare() -> None:
    """Make `import torchvision` work if it is installed; call before importing transformers."""
    if "torchvision" in sys.modules or _declared:
        return
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _native_loads(Path(spec.origin).parent):
        return
    for name in ("nms", "qnms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


def load(what: str) -> Any:
    """The torchvision module; `what` names the user's need in the error."""
    prepare()
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise UserError(
            f"{what} needs torchvision: pip install the version of it that fits your torch"
        ) from error


def _native_loads(package: Path) -> bool:
    for path in package.glob("_C*.so"):
        try:
            torch.ops.load_library(path)
            return True
        except OSError:
            pass
    return False
