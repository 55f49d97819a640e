"""docs/troubleshooting.md knows every message, docs/guarantees.md names tests that exist."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence

from hpc_oldsgd import errors
from support import ROOT

CODES = {
    name: kind.exit_code
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and hasattr(kind, "exit_code")
}


SPEAKS = (*CODES, "Unusable", "RuntimeError", "say", "warn", "end_job", "end_rank", "limit")


def variants(node: ast.AST) -> list[list[str]]:
    """The fixed parts of a message, once for each way its conditions may turn out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [[node.value]]
    if isinstance(node, ast.IfExp):
        return variants(node.body) + variants(node.orelse)
    if isinstance(node, ast.BinOp):
        return joined([node.left, node.right])
    if isinstance(node, ast.JoinedStr):
        return joined(node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, (ast.IfExp, ast.BinOp)):
        return variants(node.value)
    return [[]]


def joined(nodes: Sequence[ast.AST]) -> list[list[str]]:
    choices = itertools.product(*map(variants, nodes))
    return [[part for parts in chosen for part in parts] for chosen in choices]


def messages() -> Iterator[tuple[str, list[str]]]:
    for path in sorted((ROOT / "hpc_oldsgd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            told = called in SPEAKS or ast.unparse(node.func).endswith("messages.append")
            for argument in node.args if told else []:
                for fixed in variants(argument):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", fixed


def quoted() -> list[list[str]]:
    """What the first columns of the tables quote, each in the parts between its dots."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = page.partition("## Every message")[2]
    cells = [line.split(" | ")[0] for line in tables.splitlines() if line.startswith("| ")]
    quotes = [q for cell in cells for q in re.findall(r"`([^`]+)`", cell) if len(q) > 5]
    return [[part.strip() for part in q.split("…") if part.strip(" .,:;()-")] for q in quotes]


def test_every_message_is_explained() -> None:
    """A quoted piece of the page is in the message's fixed parts, each a good part of a line."""
    known, missing = quoted(), {}
    assert len(known) > 200
    for where, fixed in messages():
        text = "\0".join(fixed)
        if len(text.replace("\0", "").strip(" .:")) < 6:
            continue  # it passes on what another one says
        if not any(parts and all(part in text for part in parts) for parts in known):
            missing[f"{where}: {'…'.join(fixed)}"] = True
    assert not missing, "add to docs/troubleshooting.md:\n" + "\n".join(missing)


def test_every_exit_code_is_explained() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for name, code in CODES.items():
        assert f"| {code} |" in page, (name, code)


def test_guarantees_name_tests_that_exist() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 20
    for path, function in named:
        source = (ROOT / path).read_text()  # a file that is gone is an error
        assert not function or re.search(rf"^def {function}\b", source, re.M), (path, function)
