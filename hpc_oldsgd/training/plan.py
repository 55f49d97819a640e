"""A plan: graph, wire, tau and fragments, with the measurements that it was chosen by.

`--auto`, `--tau auto` and `--fragments auto` say what a run may choose (`Allowed`); `choose.py` has
the rule and `measure.py` the stopwatch. `--plan FILE` gives a plan back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..algorithms import Algorithm
from ..algorithms.fragments import Fragmented
from ..errors import UserError, unknown
from ..files import read_regular
from ..runtime.wire import check_name

ANY = "any"
GRAPHS = ("ring", "exponential", "one-peer-exponential")
WIRES = ("same", "bf16", "int8", "int4")
KEYS = {"graph": "topology", "wire": "wire", "tau": "tau", "fragments": "fragments"}
"""What --auto narrows, and the option that it stands for."""
CONFIG = "config.json"
A = TypeVar("A", bound=Algorithm)


@dataclass(frozen=True)
class Bounds:
    """What `--tau auto` or `--tau auto:LOW-HIGH` allows."""

    low: int = 1
    high: int = 64

    @classmethod
    def parse(cls, text: str) -> Bounds:
        if text == "auto":
            return cls()
        match = re.fullmatch(r"auto:(\d+)-(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(
                f"--tau {text}: write a number, auto, or auto:LOW-HIGH as in auto:2-40, from 1 up"
            )
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Allowed:
    """What may be chosen."""

    graphs: tuple[str, ...] = GRAPHS
    wires: tuple[str, ...] = WIRES
    tau: Bounds = Bounds()
    fragments: int | None = None
    """As many as this; None leaves them to the rule."""

    @classmethod
    def of(cls, asked: Mapping[str, str], algorithm: Algorithm, **given: str) -> Allowed:
        """What was left to choose, by option, as it was asked for; the others are given."""

        def names(option: str) -> tuple[str, ...]:
            return tuple(asked[option].split("|")) if option in asked else (given[option],)

        tau, fragments = algorithm.tau, asked.get("fragments", str(algorithm.P))
        return cls(
            names("topology"),
            names("wire"),
            Bounds.parse(asked["tau"]) if "tau" in asked else Bounds(tau, tau),
            None if fragments == "auto" else int(fragments),
        )


def parse_auto(text: str) -> dict[str, str]:
    """`--auto` or `--auto graph=ring,wire=fp32|bf16,tau=2-40,fragments=1` by option."""
    asked = {"topology": "|".join(GRAPHS), "wire": "|".join(WIRES), "tau": "auto",
             "fragments": "auto"}  # fmt: skip
    said = set[str]()
    for word in text.split(",") if text != ANY else ():
        key, equals, value = word.strip().partition("=")
        if key not in KEYS:
            raise unknown("choice of --auto", key, KEYS)
        if key in said:
            raise UserError(f"--auto says {key} twice: write several graphs or wires as A|B")
        said.add(key)
        if not equals or not all(value.split("|")):
            raise UserError(f"--auto {key}= leaves nothing to choose: write {key}=VALUE")
        if key == "tau":
            value = f"auto:{value}-{value}" if value.isdecimal() else f"auto:{value}"
            Bounds.parse(value)
        elif key == "fragments" and not (value.isdecimal() and int(value)):
            raise UserError(f"--auto fragments={value}: write one number, from 1 up")
        elif key == "wire":
            for name in value.split("|"):
                check_name(name)
        asked[KEYS[key]] = value
    fragments, high = asked["fragments"], Bounds.parse(asked["tau"]).high
    if fragments != "auto" and int(fragments) > high:
        raise UserError(
            f"--auto fragments={fragments} needs as many local steps, and tau is at most {high}"
        )
    return asked


@dataclass(frozen=True)
class Message:
    """Seconds of an exchange of the whole model on one graph and wire, on the slowest rank.

    Sent in P parts it has the same bytes, and each further message a cost of its own.
    """

    seconds: float
    more: float = 0.0
    stall: float = 0.0
    """What nothing hides: copying, encoding, mixing, waking up."""
    more_stall: float = 0.0

    def longer(self, times: float) -> Message:
        """Of a model that has so many times the bytes."""
        return replace(
            self,
            seconds=self.more + (self.seconds - self.more) * times,
            stall=self.more_stall + (self.stall - self.more_stall) * times,
        )


@dataclass(frozen=True)
class Tried:
    """A plan that ran for a few rounds while gradients were computed."""

    topology: str
    wire: str
    tau: int
    fragments: int
    step: float
    """Seconds of one of its steps, on the slowest rank."""
    longer: float
    """How many times as long that is as a step whose messages are hidden wholly."""

    @property
    def key(self) -> str:
        return f"{self.topology} {self.wire}"

    def rules_out(self, key: str, tau: int, P: int) -> bool:
        """If it failed: fewer steps, or more messages, hide no more."""
        return key == self.key and tau <= self.tau and self.fragments <= P

    def is_of(self, plan: Plan) -> bool:
        ours = (self.topology, self.wire, self.tau, self.fragments)
        return ours == (plan.topology, plan.wire, plan.tau, plan.fragments)


@dataclass(frozen=True)
class Measured:
    """What a choice rests on; seconds, or units in the simulator."""

    gradient: float
    """On the slowest rank."""
    messages: dict[str, Message]
    """By "GRAPH WIRE"."""
    all_reduce: float = 0.0
    slowest: int = 0
    jitter: float = 0.0
    """Relative standard deviation of a gradient's time."""
    tried: tuple[Tried, ...] = ()
    """In this order."""


@dataclass(frozen=True)
class Plan:
    topology: str
    wire: str
    tau: int
    fragments: int
    reason: str = ""
    agents: int = 0
    algorithm: str = ""
    model: str = ""
    """Which model it was measured for."""
    measured: dict[str, Any] = field(default_factory=dict)

    def apply(self, algorithm: A) -> A:
        """The algorithm with the plan's tau and fragments."""
        changed: Any = algorithm.with_tau(self.tau)
        return replace(changed, fragments=self.fragments) if in_parts(changed) else changed

    def check(self, agents: int, algorithm: str, model: str) -> None:
        """Raises UserError where it is another job's."""
        ours = {"ranks": (self.agents, agents), "algorithm": (self.algorithm, algorithm),
                "model": (self.model, model)}  # fmt: skip
        for what, (then, now) in ours.items():
            if then != now:
                raise UserError(
                    f"the plan is of another job, with {what} {then} instead of {now}: measure "
                    "anew with --auto"
                )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def in_parts(algorithm: Algorithm) -> bool:
    return isinstance(algorithm, Fragmented)


def size_of(model: torch.nn.Module) -> str:
    """What of a model decides its messages: numbers, and their type."""
    trained = [p for p in model.parameters() if p.requires_grad]
    types = sorted({str(p.dtype).removeprefix("torch.") for p in trained})
    return f"{sum(p.numel() for p in trained)} {' '.join(types)}"


def read(path: Path) -> Plan:
    """From a run's folder or config.json, or from a file that holds a plan alone."""
    file = path / CONFIG if path.is_dir() else path
    try:
        told = json.loads(read_regular(file))
        return from_dict(told.get("plan", told))
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"--plan {file} holds no plan: give the config.json of a run with --auto"
        ) from None


def from_dict(told: Mapping[str, Any]) -> Plan:
    """Raises ValueError or TypeError where it is none."""
    plan = Plan(**told)
    whole = (plan.tau, plan.fragments, plan.agents)
    texts = (plan.topology, plan.wire, plan.algorithm, plan.model)
    if not all(type(k) is int and k >= 1 for k in whole) or plan.fragments > plan.tau:
        raise ValueError("no such plan")
    if not all(isinstance(text, str) and text for text in texts):
        raise TypeError("no such plan")
    return plan
