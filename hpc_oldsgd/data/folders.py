"""Where data is looked for, and where something made from it is kept."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..errors import UserError

ENVIRONMENT = "HPC_OLDSGD_DATA"


def data_dir(given: Path | str | None, what: str) -> Path:
    """The data folder: the option, else the environment variable; `what` is looked for in it."""
    folder = given or os.environ.get(ENVIRONMENT)
    if not folder:
        raise UserError(
            f"{what} is looked for in a data folder, and none is named: "
            f"pass --data-dir DIR or set {ENVIRONMENT}"
        )
    return Path(folder).expanduser()


def cache_places(data: Path) -> tuple[Path, Path]:
    """Where something made from the data is looked for: beside it, and in the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return data / "hpc_oldsgd-cache", home / "hpc_oldsgd"


def cache_dirs(data: Path) -> list[Path]:
    """Those of them that can be written to; whether there is room is not checked."""
    places, found = cache_places(data), []
    for folder in places:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                found.append(folder)
    if found:
        return found
    raise UserError(
        f"tokens are cached in {data} or {places[1].parent}, and neither can be written to: "
        "make one writable or set XDG_CACHE_HOME"
    )
