"""The difference wire, `--wire int8` and `int4`: what travels is the change since the last message.

Each agent keeps a public copy z_i of what its neighbours know of it, and their z_j, equal bit for
bit at both ends:

    q_i = Q(x_i - z_i);  z_i <- z_i + q_i;  send q_i;     on arrival  z_j <- z_j + q_j
    x_i <- x_i + sum_j w_ij (z_j - z_i)

Q rounds blocks of numbers to 8 or 4 bits (ops/narrow.py). What it loses is sent later, since it
stays in x_i - z_i, and the sum over all agents is kept whatever it loses (CHOCO-SGD: Koloskova,
Stich, Jaggi, 2019).

A stream is all that an exchange needs to remember from one time to the next: one for every tensor
that a round sends (the model, each fragment of it, an algorithm's own), and on a graph that changes
one for each of its phases, since other neighbours know other things. The first message of a stream
is z_i = x_i, whole. So is the first one after a checkpoint is loaded: it holds z_i alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..errors import UserError
from ..launch.memory import memory_available
from .lost_share import LostShare

if TYPE_CHECKING:
    from ..topology import Topology
    from .base import FadingTail

ALIGN_BYTES = 16  # the statistics behind the differences begin at a multiple


@dataclass(frozen=True)
class Narrow:
    """A wire of so many bits a number."""

    bits: int

    def __str__(self) -> str:
        return f"int{self.bits}"


@dataclass(frozen=True)
class Form:
    """How a message lies in memory: differences, then running statistics in full precision."""

    bits: int
    d: int
    body: int
    """Numbers that are sent as differences: all but the statistics at the end."""
    itemsize: int

    @property
    def body_bytes(self) -> int:
        return ops.message_bytes(self.body, self.bits)

    @property
    def tail_start(self) -> int:
        return -(-self.body_bytes // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def nbytes(self) -> int:
        tail = (self.d - self.body) * self.itemsize
        return self.tail_start + tail if tail else self.body_bytes

    @property
    def share(self) -> float:
        """Of the bytes that the tensor has in its own type."""
        return self.nbytes / (self.d * self.itemsize) if self.d else 1.0

    def differences(self, message: torch.Tensor) -> torch.Tensor:
        return message[..., : self.body_bytes]

    def tail(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return message[..., self.tail_start : self.nbytes].view(dtype)


@dataclass
class Stream:
    """Of one tensor that is sent again and again; z is (d,), or (n, d) of all agents."""

    name: str
    form: Form = Form(8, 0, 0, 1)
    z: torch.Tensor | None = None
    """The own public copy; None before the first message."""
    holds_x: bool = False
    """z is that of the message under way, or of one that is encoded and has not left."""
    known: bool = False
    """The neighbours have z: a difference is enough."""
    busy: bool = False
    """A flight of it is open."""
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    """The neighbours' public copies, over MPI."""
    ahead: Any = None
    """The channel whose message the last mix has encoded."""

    def take(self, x: torch.Tensor, message: torch.Tensor, lost: LostShare) -> None:
        """z becomes the public copy of x as it is now, and `message` the difference.

        The first time, and where z is that already, nothing is written to `message`.
        """
        if self.z is None:
            self.z = x.detach().clone(memory_format=torch.contiguous_format)
        elif not self.holds_x:
            with lost.watching(self.name, x, self.z, self.form.body):
                self._encode(x, self.z, message)
        self.holds_x = True

    def end(self) -> None:
        """The flight has: both ends have the same copies."""
        self.busy = self.holds_x = False
        self.known = True

    def _encode(self, x: torch.Tensor, z: torch.Tensor, message: torch.Tensor) -> None:
        form, k = self.form, self.form.body
        if k:
            ops.encode(x[..., :k], z[..., :k], form.differences(message), form.bits)
        self.write_tail(x, z, message)

    def write_tail(self, x: torch.Tensor, z: torch.Tensor, message: torch.Tensor) -> None:
        k = self.form.body
        if k < self.form.d:
            z[..., k:] = x[..., k:]
            self.form.tail(message, x.dtype).copy_(x[..., k:])

    def read_tail(self, j: int, message: torch.Tensor) -> None:
        k, copy = self.form.body, self.copies[j]
        if k < self.form.d:
            copy[k:] = self.form.tail(message, copy.dtype)

    def apply(self, j: int, message: torch.Tensor) -> None:
        """A message of neighbour j that no mix reads: its copy keeps up."""
        form, k = self.form, self.form.body
        if k:
            ops.decode_add(self.copies[j][:k], form.differences(message), form.bits)
        self.read_tail(j, message)


def check_memory(
    wire: Narrow, x: torch.Tensor, tensors: int, topology: Topology, rank: int, here: int
) -> None:
    """Refuses public copies that the machine has no room for; `here` ranks share it.

    A round exchanges so many tensors. Of a rank below 0: of all agents in one process, which need
    no neighbours' copies.
    """
    phases = range(topology.period)
    each = len(phases)
    if rank >= 0:
        each += sum(len(topology.neighbours(rank, phase)) for phase in phases)
    models = each * tensors
    need = models * x.numel() * x.element_size() * here
    free = torch.cuda.mem_get_info(x.device)[0] if x.is_cuda else memory_available()
    if free is not None and need > free:
        raise UserError(
            f"the wire {wire} on {topology.name} keeps {models} copies of the model, "
            f"{need / 1e9:.3g} GB on this machine, and {free / 1e9:.3g} GB are free: use bf16, "
            "or a graph of fewer neighbours or phases"
        )


class Streams:
    """Those of one transport. Every agent opens the same ones in the same order."""

    def __init__(self, bits: int, period: int) -> None:
        self.bits, self.period = bits, period
        self.lost = LostShare(bits)
        self._known: dict[str, Stream] = {}
        self._round, self._others = -1, 0

    def open(
        self, x: torch.Tensor, round: int, model: torch.Tensor | None, tail: FadingTail | None
    ) -> Stream:
        """The stream of this exchange, which is busy from now on.

        A part of the model is known by its place, another tensor by its turn in the round.
        """
        if round != self._round:
            self._round, self._others = round, 0
        if model is not None and _memory(x) == _memory(model):
            what = f"x:{x.storage_offset() - model.storage_offset()}"
        else:
            what, self._others = str(self._others), self._others + 1
        place = f"{what}:{x.shape[-1]}:{str(x.dtype)[6:]}:{round % self.period}"
        for lane in count():
            name = f"{place}:{lane}"
            stream = self._known.get(name)
            if stream is None:
                self._make_room(name)
                stream = self._known[name] = Stream(name)
            if not stream.busy:
                start = tail_start(x, tail)
                stream.form = Form(self.bits, int(x.shape[-1]), start, x.element_size())
                stream.busy = True
                return stream
        raise AssertionError

    def forget(self) -> None:
        """All begin anew. Collective, and with nothing under way."""
        for name in list(self._known):
            self._remove(name)
        self._round, self._others = -1, 0

    def state_dict(self) -> dict[str, Any]:
        known = {k: s for k, s in self._known.items() if s.z is not None}
        return {k: {"z": s.z, "holds_x": s.holds_x} for k, s in known.items()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Collective: each stream goes on by a message that is whole."""
        self.forget()
        for name, saved in state.items():
            z = saved["z"].to(device, copy=True)
            self._known[name] = Stream(name, z=z, holds_x=bool(saved["holds_x"]))

    @property
    def held_bytes(self) -> int:
        """Of all copies, the own ones too."""
        copies = [t for s in self._known.values() for t in (s.z, *s.copies.values())]
        return sum(t.numel() * t.element_size() for t in copies if t is not None)

    def _make_room(self, name: str) -> None:
        """Other fragments of the model in its place, of the time before tau changed, go."""
        if not name.startswith("x:"):
            return
        a, b, rest = _range(name)
        for other in [k for k in self._known if k.startswith("x:") and k != name]:
            start, end, same = _range(other)
            if same == rest and start < b and a < end:
                self._remove(other)

    def _remove(self, name: str) -> None:
        stream = self._known.pop(name)
        if stream.ahead is not None:
            stream.ahead.encoded = None  # its message never leaves


def _range(name: str) -> tuple[int, int, str]:
    _, start, length, rest = name.split(":", 3)
    return int(start), int(start) + int(length), rest


def tail_start(x: torch.Tensor, tail: FadingTail | None) -> int:
    """Where in x averages begin that fade; its length if it has none."""
    d = int(x.shape[-1])
    if tail is None or _memory(tail.x) != _memory(x):
        return d
    offset = int(x.storage_offset() - tail.x.storage_offset())
    return min(max(tail.start - offset, 0), d)


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
