"""The drop-in: `loss.backward(); agent.step()` in place of `optimizer.step()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import topology as topologies
from .algorithms import Algorithm, get
from .errors import UserError
from .flat import Buffers, Flat
from .schedule import Runner
from .topology import Topology
from .trace import Trace

if TYPE_CHECKING:
    from mpi4py import MPI

    from .transport.mpi import MpiTransport

WIRES = {
    None: None,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Agent(Runner):
    """One MPI rank's model, trained by a decentralized algorithm.

    The parameters that require a gradient, and the float buffers, become views of one flat
    tensor `agent.x`. Make the agent after the model is on its device; change weights in place.
    All ranks start from rank 0's model unless `sync=False`. Collective, like `finish()`.
    """

    transport: MpiTransport

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm | str = "oldsgd",
        topology: Topology | str = "ring",
        comm: MPI.Comm | None = None,
        *,
        buffers: Buffers = "mix",
        sync: bool = True,
        wire: torch.dtype | str | None = None,
        trace: Trace | None = None,
        **transport_options: Any,
    ) -> None:
        """`transport_options` (progress, staging, timeout_s, ...) are those of MpiTransport."""
        from .transport.mpi import MpiTransport, Startup, world

        comm = world() if comm is None else comm
        startup = Startup(comm)
        algorithm = get(algorithm)() if isinstance(algorithm, str) else algorithm
        if isinstance(topology, str):
            topology = topologies.from_name(topology, comm.size)
        self.model, self.optimizer = model, optimizer
        self.flat = startup.check(lambda: Flat(model, buffers))
        transport = MpiTransport(
            comm, topology, wire=wire_type(wire, self.flat.dtype), trace=trace, **transport_options
        )
        super().__init__(self.flat.x, algorithm, transport, trace)
        try:
            startup.check(self._check_optimizer)
            self._check_same_model()
        except UserError:  # on all ranks alike
            transport.close()
            raise
        if sync:
            self._take_rank_zeros_model()
        if transport.progress == "poll":
            for slot in self.flat.parameters:
                slot.tensor.register_post_accumulate_grad_hook(lambda _: transport.poll())
        self.on_round.append(lambda _: self.flat.check_views())
        self.start()

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def n(self) -> int:
        return self.transport.n

    @property
    def alpha(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self) -> bool:
        """After `loss.backward()`: the local step, and at the end of a round the mixing.

        False once a stop was agreed; the model is then at a round boundary.
        """
        if self.algorithm.reads_gradient:
            return self.advance(self.flat.gradient())
        return self.advance(self.x)  # the schedule only passes it on to descend()

    def descend(self, g: Tensor) -> None:
        if self.algorithm.reads_gradient:
            own = self.flat.gradient()
            if g is not own:
                own.copy_(g)
        self.optimizer.step()

    def mean(self) -> Tensor:
        """The average of all agents' x, for evaluation or export. Collective, blocking."""
        return self.all_reduce(self.x).mean(torch.empty_like(self.x))

    def _boundary(self) -> bool:
        before = self.flat.version()
        stop = super()._boundary()
        if self.flat.version() != before:  # a hook has changed weights
            self.transport.forget()
        return stop

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        super().load_state_dict(state)

    def _check_optimizer(self) -> None:
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for slot in self.flat.parameters:
            if id(slot.tensor) not in known:
                raise UserError(
                    f"{slot.name} requires a gradient but is not in the optimizer: add it, "
                    "or freeze it with requires_grad_(False)"
                )
        check_form(self.algorithm, self.optimizer, self.flat)

    def _check_same_model(self) -> None:
        how = f"{self.algorithm!r},{self.transport.wire}".replace(" ", "")
        signatures = self.transport.gather_text(f"{how} {self.flat.signature()}")
        for j, signature in enumerate(signatures):
            if signature != signatures[0]:
                ours, theirs = signatures[0].split(" "), signature.split(" ")
                k = next(
                    (k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                    min(len(ours), len(theirs)),
                )
                a, b = ([*s, "nothing more"][min(k, len(s))] for s in (ours, theirs))
                raise UserError(
                    f"rank {j} has another model or algorithm than rank 0: {b} instead of {a} "
                    f"({len(theirs) - 1} tensors against {len(ours) - 1})"
                )

    def _take_rank_zeros_model(self) -> None:
        self.transport.broadcast(self.x)
        inside = {id(slot.tensor) for slot in self.flat.slots}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if id(tensor) not in inside:  # frozen, integer or local: equal at the start, too
                self.transport.broadcast(tensor)


def check_form(algorithm: Algorithm, optimizer: torch.optim.Optimizer, flat: Flat) -> None:
    """The gradient form replaces x by what was sent less the gradients, so they must tell all."""
    if getattr(algorithm, "form", None) != "gradient":
        return
    groups = optimizer.param_groups
    plain = type(optimizer) is torch.optim.SGD and not any(
        group[key] for group in groups for key in ("momentum", "weight_decay", "nesterov")
    )
    if not plain or len({group["lr"] for group in groups}) > 1:
        raise UserError(
            'form="gradient" is the paper\'s literal update, for torch.optim.SGD without '
            'momentum or weight decay: use form="delta" with this optimizer'
        )
    if len(flat.parameters) < len(flat.slots):
        raise UserError(
            'form="gradient" would lose what BatchNorm has counted in a round: use '
            'buffers="local" or form="delta" with this model'
        )


def wire_type(wire: torch.dtype | str | None, model: torch.dtype) -> torch.dtype | None:
    if isinstance(wire, str) and wire not in WIRES:
        raise UserError(f"there is no wire type {wire!r}; known: fp32, bf16, fp16, fp64")
    chosen = WIRES[wire] if wire is None or isinstance(wire, str) else wire
    if chosen is not None and chosen != model and chosen.itemsize >= model.itemsize:
        raise UserError(f"the wire type {chosen} is not narrower than the model's {model}")
    return chosen
