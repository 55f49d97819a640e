"""Private names of torch, which may go with any version, are in one module, with a way out each."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_oldsgd import UserError, torch_private
from hpc_oldsgd.runtime.flat import Flat
from support import ROOT

NOT_TORCH = {"_exit", "_asdict", "_sizeof", "_addressof"}  # of os, named tuples and mpi4py
MODULES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
"""nn.Module's dictionaries; some classes of ours have attributes of the same names."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def foreign_names() -> Iterator[str]:
    """Private attributes that no module of ours defines, and imports with a private part."""
    files = [*(ROOT / "hpc_oldsgd").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    trees = {path: ast.parse(path.read_text()) for path in sorted(files)}
    own = {name for tree in trees.values() for name in defined(tree)} - set(MODULES) - {"_version"}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            found = ""
            if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
                found = ast.unparse(node)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                module = node.module or ""
                names = [*module.split("."), *(a.name for a in node.names)]
                if any(map(private, names)):
                    found = module
            if found.startswith("self."):  # an attribute of ours that has torch's name
                continue
            if found and found.rpartition(".")[2] not in NOT_TORCH:
                yield f"{path.relative_to(ROOT)}: {found}"


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_no_private_name_of_torch_is_used_without_a_way_out() -> None:
    """torch_private.py asks for them by getattr(), with a default."""
    assert list(foreign_names()) == []
    tree = ast.parse(Path(torch_private.__file__).read_text())
    asked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"
    ]
    assert len(asked) > 5 and all(len(node.args) == 3 or public(node) for node in asked)


def public(asked: ast.Call) -> bool:
    name = asked.args[1]
    return isinstance(name, ast.JoinedStr) and ast.unparse(name).startswith("f'named_")


def test_a_torch_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way out, taken."""
    monkeypatch.delattr(torch, "_foreach_add_")
    monkeypatch.delattr(nn.modules.batchnorm, "_BatchNorm")
    monkeypatch.delattr(nn.modules.instancenorm, "_InstanceNorm")
    monkeypatch.delattr(nn.modules.dropout, "_DropoutNd")
    spec = importlib.util.spec_from_file_location("poorer", Path(torch_private.__file__))
    assert spec is not None and spec.loader is not None
    poorer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(poorer)
    assert isinstance(nn.BatchNorm3d(2), poorer.BATCH_NORMS)
    assert not isinstance(nn.InstanceNorm1d(2), poorer.BATCH_NORMS)
    assert isinstance(nn.InstanceNorm1d(2), poorer.INSTANCE_NORMS)
    assert isinstance(nn.AlphaDropout(), poorer.DROPOUTS)
    a, b = ([torch.arange(5.0) / 3, torch.ones(2)] for _ in range(2))
    more = [torch.full((5,), 0.7), torch.ones(2)]
    poorer.add_to_all(a, more, -0.1)
    monkeypatch.undo()
    torch_private.add_to_all(b, more, -0.1)
    assert all(map(torch.equal, a, b))
    assert torch_private.version(object()) == torch_private.UNKNOWN  # type: ignore[arg-type]
    assert torch_private.steps_of(object()) is None
    assert torch_private.hooks(object()) == []  # type: ignore[arg-type]
    monkeypatch.delattr(torch, "_C")
    assert torch_private.file_of_torch() == ""


class Poorer(nn.Module):
    """Of a torch whose modules hold their tensors under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("center", torch.zeros(2))

    def __getattribute__(self, name: str) -> Any:
        if name in MODULES[:2] and sys._getframe(1).f_globals["__name__"].startswith("hpc_oldsgd"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_modules_that_hold_their_tensors_elsewhere() -> None:
    model = Poorer()
    flat = Flat(model)
    flat.check_views()
    assert [slot.name for slot in flat.slots] == ["weight", "center"]
    model.center = model.center + 1  # as a forward pass does
    assert flat.adopt() and flat.slots[1].view(flat.x).tolist() == [1, 1]
    assert model.center is flat.slots[1].tensor
    model.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match="weight was replaced by another tensor"):
        flat.check_parameters()


def test_spectral_norm_is_known_by_its_name() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    assert sum(map(torch_private.is_spectral_norm, layer.modules())) == 1


def test_what_torch_has_is_used() -> None:
    x = Tensor([1.0])
    before = torch_private.version(x)
    x.add_(1)
    assert torch_private.version(x) == before + 1
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(print)
    layer.register_forward_pre_hook(print)
    assert torch_private.hooks(layer) == [print, print]
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([x], lr=1.0), 1)
    assert torch_private.steps_of(scheduler) == 0
    assert issubclass(nn.SyncBatchNorm, torch_private.BATCH_NORMS)
    assert torch_private.file_of_torch() == sys.modules["torch._C"].__file__
