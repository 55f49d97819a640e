"""Reports inside a page of the documentation, between markers, as docs/results.md has them."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path

from .. import cli
from ..errors import UserError

# A reader need not repeat where runs are, or how many run at a time.
LEFT_OUT = {"--out", "--write", "--also", "--jobs", "--report-only"}


def write(page: Path, block: str, key: str) -> None:
    if not page.is_file():
        raise UserError(f"--write: there is no file {page}")
    page.write_text(with_block(page.read_text(), block, key))


def with_block(text: str, block: str, key: str) -> str:
    """The page with a new block between its two markers."""
    begin, end = f"<!-- {key}: begin -->", f"<!-- {key}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise UserError(f"--write: the page has no block between {begin} and {end}")
    head, _, rest = text.partition(begin)
    tail = rest.partition(end)[2]
    inside = block.strip("\n")  # spaces before a command are its layout
    return f"{head}{begin}\n\n{inside}\n\n{end}{tail}"


def picture(source: Path, target: Path) -> None:
    """A copy in few colours: a third of the size, and lines lose nothing."""
    from PIL import Image  # matplotlib brings it

    target.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(source) as image:
        image.convert("RGB").quantize(64).save(target, optimize=True)


def command(argv: Sequence[str]) -> str:
    return f"python -m hpc_oldsgd.study {shlex.join(cli.without(argv, LEFT_OUT))}"


def machine() -> str:
    """Cores and processor, and the GPU where there is one."""
    import torch

    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = f"with {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "without a GPU"
    return f"Made on {os.cpu_count()} cores of {name}, {gpu}"
