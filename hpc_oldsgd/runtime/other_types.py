"""Tensors of another type than x, as fp32 norms in a bf16 model: mixed beside x in the same way.

Each type has a vector of its own, and one more small message a round travels with x's. They are
mixed by OLDSGD's delta form, so only under OLDSGD are all tensors of a model treated alike.
"""

from __future__ import annotations

import torch

from ..algorithms import OLDSGD, Algorithm
from ..errors import UserError
from ..transport.base import Flight, Transport, Wire
from .flat import Buffers, Flat, Slot
from .running_statistics import running_statistics


class OtherTypes:
    def __init__(self, flats: list[Flat]) -> None:
        self.flats = flats
        self._tails = [running_statistics([flat]) for flat in flats]
        self._flights: list[Flight] = []

    @property
    def slots(self) -> list[Slot]:
        return [slot for flat in self.flats for slot in flat.slots]

    def send(self, transport: Transport, r: int) -> None:
        """At the top of round r: the snapshots start moving."""
        kept = transport.tail
        for flat, transport.tail in zip(self.flats, self._tails, strict=True):
            self._flights.append(transport.exchange(flat.x, r))
        transport.tail = kept

    def mix(self, transport: Transport) -> None:
        """At the end of the round, after x."""
        for flat, flight in zip(self.flats, self._flights, strict=False):
            of_x = transport.distance
            flight.mix_into(flat.x)
            if transport.measure_distance and of_x is not None and transport.distance is not None:
                transport.distance = of_x + transport.distance
        self._flights = []

    def drop(self) -> None:
        self._flights = []

    def check(self, algorithm: Algorithm, wire: Wire, own: Flat) -> None:
        for flat in self.flats:
            first = flat.slots[0]
            if type(algorithm) is not OLDSGD or algorithm.form != "delta":
                raise UserError(
                    f"{first.name} is {flat.dtype}, {own.slots[0].name} is {own.dtype}: this "
                    "algorithm mixes one dtype only. Cast the model, for instance by "
                    f"model.to({own.dtype}), or use OLDSGD in its delta form"
                )
            if not isinstance(wire, torch.dtype):
                continue
            if wire != flat.dtype and wire.itemsize >= flat.dtype.itemsize:
                raise UserError(
                    f"{first.name} is {flat.dtype}, which does not fit the wire type {wire}: leave "
                    "wire out"
                )


def flatten(
    module: torch.nn.Module, buffers: Buffers, types: list[torch.dtype]
) -> tuple[Flat, OtherTypes]:
    """x of the first type, and the others."""
    flats = [Flat(module, buffers, dtype=dtype) for dtype in types]
    devices = {flat.device for flat in flats}
    if len(devices) > 1:
        raise UserError(f"the model is on several devices ({devices}): move it to one")
    return flats[0], OtherTypes(flats[1:])
