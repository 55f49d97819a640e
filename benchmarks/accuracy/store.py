"""Finished cells in a folder, so that a command that is started again goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.files import write_atomically

from .report import reached

Run = dict[str, Any]


class Store:
    """`settings.json`, and a file for each cell and for each tau that was chosen."""

    def __init__(self, folder: Path, identity: dict[str, Any], grows: bool) -> None:
        self.folder, self.identity, self.grows = folder, identity, grows
        folder.mkdir(parents=True, exist_ok=True)
        kept = self._read("settings")
        for name, value in identity.items():
            if kept is not None and kept["identity"].get(name) != value:
                raise UserError(
                    f"{folder} has results with --{name.replace('_', '-')} "
                    f"{kept['identity'].get(name)}, not {value}: name another folder."
                )

    # How long a gradient takes decides what a slow network is: measured once for all cells.

    def link(self) -> dict[str, Any] | None:
        kept = self._read("settings")
        return None if kept is None else kept["link"]

    def write_link(self, link: dict[str, Any]) -> None:
        self._write("settings", {"identity": self.identity, "link": link})

    def run(self, entry: str, ratio: float, repeat: int) -> Run | None:
        return self._read(f"ratio-{ratio:g}_repeat-{repeat}_{slug(entry)}")

    def write_run(self, run: Run) -> None:
        name = f"ratio-{run['ratio']:g}_repeat-{run['repeat']}_{slug(run['entry'])}"
        self._write(name, run)

    def pilot(self, entry: str, ratio: float) -> dict[str, Any] | None:
        return self._read(f"ratio-{ratio:g}_pilot_{slug(entry)}")

    def write_pilot(self, entry: str, ratio: float, told: dict[str, Any]) -> None:
        self._write(f"ratio-{ratio:g}_pilot_{slug(entry)}", told)

    def seconds(self, entry: str, ratio: float, repeat: int) -> float | None:
        """To the target; None where it was not reached, or not tried."""
        run = self.run(entry, ratio, repeat)
        return None if run is None else reached(run, self.identity["target"], self.grows)

    def finished(self, entry: str, ratio: float, repeat: int, limit: float) -> bool:
        """At its target, or it was given as long as it is given now."""
        run = self.run(entry, ratio, repeat)
        if run is None:
            return False
        return self.seconds(entry, ratio, repeat) is not None or run["limit"] >= 0.999 * limit

    def _read(self, name: str) -> Any:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def _write(self, name: str, value: Any) -> None:
        write_atomically(self.folder / f"{name}.json", json.dumps(value) + "\n")


def limit_of(
    store: Store, first: str, entry: str, ratio: float, repeat: int, limit: float, give_up: float
) -> float:
    """Seconds that a contestant gets: no use in a run that is many times as long as the first's."""
    ours = store.seconds(first, ratio, repeat) if give_up and entry != first else None
    return limit if ours is None else min(limit, give_up * ours)


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
