"""A tree of tensors and plain values as one safetensors file; nothing is ever unpickled.

Tensors are safetensors entries, everything around them JSON in the file's metadata. The file is
written and hashed in one pass of large writes, which leave the interpreter lock to the training.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..files import replacing, sync_folder

PIECE_BYTES = 1 << 24
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Unusable(Exception):
    """A file of a checkpoint is missing, torn or not what it should be; the message says why."""


@dataclass(frozen=True)
class Written:
    sha256: str
    bytes: int


def snapshot(tree: Any) -> Any:
    """A copy in host memory that the training no longer touches; waits for a device's copies."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: snapshot(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(snapshot, tree))
    return tree


def write(path: Path, tree: Any) -> Written:
    """The file has its name only when it is complete and on the disk."""
    tensors: dict[str, Tensor] = {}
    described = json.dumps(_pack(tree, tensors, ""))
    # Wide types first: every tensor then starts at a multiple of its own size.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": {"tree": described}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    pieces = [struct.pack("<Q", len(head)) + head, *(_bytes(tensors[name]) for name in order)]
    digest = hashlib.sha256()
    with replacing(path) as temporary, temporary.open("xb", buffering=0) as file:
        for whole in pieces:
            view = memoryview(whole)
            for a in range(0, len(view), PIECE_BYTES):
                _write_all(file.fileno(), view[a : a + PIECE_BYTES])
                digest.update(view[a : a + PIECE_BYTES])
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return Written(digest.hexdigest(), 8 + len(head) + end)


def read(path: Path) -> Any:
    """The tree of a file that `write` made. Raises Unusable."""
    try:
        with safe_open(path, framework="pt") as file:
            described = json.loads((file.metadata() or {})["tree"])
            return _unpack(described, file.get_tensor)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise Unusable(f"{path.name} cannot be read ({_short(error)})") from None


def check(path: Path, expected: Written) -> None:
    """The file is byte for byte the one that was written. Raises Unusable, or OSError where the
    disk does not answer."""
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            raise Unusable(f"{path.name} has {size} bytes instead of {expected.bytes}")
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise Unusable(f"{path.name}: {error.strerror}") from None
    except OSError as error:  # read() does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from None
    if digest.hexdigest() != expected.sha256:
        raise Unusable(f"the checksum of {path.name} is wrong")


# -- trees -------------------------------------------------------------------------------------


def _pack(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Plain JSON: every container is tagged, every tensor named after its place."""
    if isinstance(tree, Tensor):
        if tree.dtype not in DTYPES:
            raise TypeError(f"{name} is {tree.dtype}, which a checkpoint does not hold")
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"dict": [[k, _pack(v, tensors, _join(name, k))] for k, v in tree.items()]}
    if isinstance(tree, (list, tuple)):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_pack(v, tensors, _join(name, k)) for k, v in enumerate(tree)]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise TypeError(f"{name} is a {type(tree).__name__}, which a checkpoint does not hold")


def _unpack(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return {key: _unpack(value, tensor) for key, value in content}
    values = [_unpack(value, tensor) for value in content]
    return values if kind == "list" else tuple(values)


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _write_all(handle: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(handle, piece) :]


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:100] or type(error).__name__
