"""A study's folder: report.md, report.html that stands alone, a CSV of each table, commands.sh."""

from __future__ import annotations

import base64
import html
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import pages
from .cells import Cell
from .collect import Table, as_csv, markdown
from .collect import cell as cell_text

PAGE_ROWS = 24  # of a table on a page
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1e293b;max-width:62rem;margin:2rem auto;"
    "padding:0 1rem}table{border-collapse:collapse;margin:1rem 0;font-size:14px}"
    "td,th{border-bottom:1px solid #e2e8f0;padding:.25rem .7rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    "ul{margin:.2rem 0}pre{background:#f1f5f9;padding:.7rem;overflow-x:auto}"
)


@dataclass
class Section:
    title: str
    text: Sequence[str] = ()
    """Paragraphs; one that starts with "- " is an item of a list."""
    table: Table = field(default_factory=list)
    name: str = ""
    """Of the CSV."""
    figures: Sequence[Path] = ()
    """PNG files beside the report, each with an SVG of the same name."""
    shown: Table = field(default_factory=list)
    """A shorter table that readers see instead."""

    @property
    def visible(self) -> Table:
        return self.shown or self.table

    def markdown(self, most_rows: float = math.inf) -> list[str]:
        """Text and table, without the heading; a longer table is left out."""
        shown = 0 < len(self.visible) <= most_rows
        return [*_paragraphs(self.text), *([markdown(self.visible), ""] if shown else [])]


@dataclass
class Report:
    title: str
    sections: list[Section]
    cells: Sequence[Cell] = ()
    launcher: str = "mpirun -n {n}"
    """Of runs over MPI."""

    def publish(self, folder: Path, page: Path | None = None) -> None:
        """Write it, into a page's block too, and show it; the runs are in a folder beside it."""
        self.write(folder, folder.parent / "runs")
        print(self.markdown())
        print(f"written to {folder}/report.md and report.html")
        if page is not None:
            pages.write(page, self.block(folder, page.parent / "figures"), self.key)

    @property
    def key(self) -> str:
        """Names the report on a page: "Speed-up: digits" is speed-up-digits."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def block(self, folder: Path, figures: Path) -> str:
        """The report as a part of a page: no headings, no tables that fill one, and of the
        figures of a section the first and the last."""
        lines = [_behind("    ", pages.command(sys.argv[1:])), "", f"{pages.machine()}.", ""]
        for section in self.sections:
            lines += section.markdown(PAGE_ROWS)
            drawn = section.figures
            for path in dict.fromkeys([*drawn[:1], *drawn[-1:]]):
                name = f"{self.key}-{path.name}"
                pages.picture(folder / path.name, figures / name)
                lines += [f"![{path.stem}](figures/{name})", ""]
        return "\n".join(lines)

    def write(self, folder: Path, runs: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for section in self.sections:
            if section.table and section.name:
                (folder / f"{section.name}.csv").write_text(as_csv(section.table))
        (folder / "commands.sh").write_text(self.commands(runs))
        (folder / "report.md").write_text(self.markdown())
        (folder / "report.html").write_text(self.html(folder))

    def commands(self, runs: Path) -> str:
        lines = ["#!/bin/sh", "# The study; finished runs are not run again.", command(), ""]
        if self.cells:
            lines.append("# Its runs, each by itself, in place of what is there:")
        unique = {cell.key: cell for cell in self.cells}.values()
        for cell in unique:
            words = [*cell.words(runs / cell.folder), "--overwrite"]
            start = f"{self.launcher.format(n=cell.n)} python -m hpc_oldsgd.train"
            program = start if cell.mpi else "python -m hpc_oldsgd.simulate"
            lines.append(_behind("# ", f"{program} {shlex.join(words)}"))
        return "\n".join(lines) + "\n"

    def markdown(self) -> str:
        lines = [f"# {self.title}", "", _behind("    ", command()), ""]
        for section in self.sections:
            lines += [f"## {section.title}", "", *section.markdown()]
            for path in section.figures:
                lines += [f"![{path.stem}]({path.name})", ""]
        return "\n".join(lines)

    def html(self, folder: Path) -> str:
        body = [f"<h1>{html.escape(self.title)}</h1><pre>{html.escape(command())}</pre>"]
        for section in self.sections:
            body.append(f"<h2>{html.escape(section.title)}</h2>")
            for text in section.text:
                item = text.startswith("- ")
                inner = _inline(text.removeprefix("- "))
                body.append(f"<ul><li>{inner}</li></ul>" if item else f"<p>{inner}</p>")
            if section.visible:
                body.append(_html_table(section.visible))
            for path in section.figures:
                data = base64.b64encode((folder / path.name).read_bytes()).decode()
                body.append(f'<img alt="{path.stem}" src="data:image/png;base64,{data}">')
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(self.title)}'
            f"</title><style>{STYLE}</style>\n" + "\n".join(body) + "</html>\n"
        )


def duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:.1f} {unit}"
    return f"about {max(1.0, seconds):.0f} s"


def command() -> str:
    return f"python -m hpc_oldsgd.study {shlex.join(sys.argv[1:])}"


def _behind(mark: str, text: str) -> str:
    """Every line of it: a word of a command may hold a line break, which would end a comment."""
    return "\n".join(mark + line for line in text.split("\n"))


def _paragraphs(texts: Sequence[str]) -> list[str]:
    """No empty lines between the items of a list."""
    lines: list[str] = []
    for text in texts:
        if text.startswith("- ") and lines[-2:-1] and lines[-2].startswith("- "):
            lines.pop()
        lines += [text, ""]
    return lines


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(k)}</th>" for k in table[0])
    rows = (
        "<tr>" + "".join(f"<td>{html.escape(cell_text(k, v))}</td>" for k, v in row.items())
        for row in table
    )
    return f"<table><tr>{head}</tr>\n" + "</tr>\n".join(rows) + "</tr></table>"


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
