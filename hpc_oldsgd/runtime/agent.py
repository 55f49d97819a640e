"""The drop-in: `loss.backward(); agent.step()` in place of `optimizer.step()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from .. import topology as topologies
from ..algorithms import Algorithm, get
from ..errors import UserError
from ..topology import Topology
from ..transport.trace import Trace
from .flat import Buffers, Flat
from .runner import Runner
from .running_statistics import running_statistics
from .sgd import Optimizer, one_alpha
from .unread_gradient import UNREAD
from .wire import check_form, check_wire, wire_type

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..transport.mpi import MpiTransport


class Agent(Runner):
    """One MPI rank's model, trained by a decentralized algorithm.

    The parameters that require a gradient, and the float buffers, become views of one flat
    tensor `agent.x`. Make the agent after the model is on its device; change weights in place.
    All ranks start from rank 0's model unless `sync=False`. Collective, like `finish()`: ranks
    take equally many steps. One that waits `timeout_s` for another ends the job and names it.
    """

    transport: MpiTransport

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        algorithm: Algorithm | str = "oldsgd",
        topology: Topology | str = "ring",
        comm: MPI.Comm | None = None,
        *,
        buffers: Buffers = "mix",
        sync: bool = True,
        wire: torch.dtype | str | None = None,
        trace: Trace | None = None,
        timeout_s: float | None = 600.0,
        **transport_options: Any,
    ) -> None:
        """`timeout_s=None` waits for ever; `transport_options` are those of MpiTransport."""
        from ..transport.mpi import MpiTransport, Startup, world

        comm = world() if comm is None else comm
        startup = Startup(comm, timeout_s)
        algorithm = get(algorithm)() if isinstance(algorithm, str) else algorithm
        if isinstance(topology, str):
            topology = topologies.from_name(topology, comm.size)
        self.model, self.optimizer = model, optimizer
        self.flat = startup.check(lambda: Flat(model, buffers))
        transport = MpiTransport(
            comm, topology, wire=wire_type(wire, self.flat.dtype), trace=trace,
            timeout_s=timeout_s, **transport_options,
        )  # fmt: skip
        tail = running_statistics([self.flat])
        super().__init__(self.flat.x, algorithm, transport, trace, tail)
        try:
            startup.check(self._check_optimizer)
            self._check_same_model(sync)
        except UserError:  # on all ranks alike
            transport.close()
            raise
        if sync:
            self._take_rank_zeros_model()
        self._hooks: list[RemovableHandle] = []
        if transport.progress == "poll":
            for slot in self.flat.parameters:
                tensor: Any = slot.tensor
                hook = tensor.register_post_accumulate_grad_hook(lambda _: transport.poll())
                self._hooks.append(hook)
        self.observers.append(lambda _: self.flat.check_views())
        self.start()

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def n(self) -> int:
        return self.transport.n

    @property
    def alpha(self) -> float:
        return one_alpha(self.optimizer)

    def step(self) -> bool:
        """After `loss.backward()`: the local step, and at the end of a round the mixing.

        False once a stop was agreed; the model is then at a round boundary.
        """
        return self.advance(self.flat.gradient() if self.algorithm.reads_gradient else UNREAD)

    def descend(self, g: Tensor) -> None:
        if g is not UNREAD:
            own = self.flat.gradient()
            if g is not own:
                own.copy_(g)
        self.optimizer.step()
        increment_version(self.x)  # it changed x through the parameters, which count for themselves

    def version(self) -> int:
        return self.flat.version()

    def local_step(self) -> None:
        """After `loss.backward()`: an optimizer step outside of any round."""
        if self.algorithm.reads_gradient:
            self.flat.gradient()
        self.optimizer.step()
        self.t += 1

    def mean(self) -> Tensor:
        """The average of all agents' x, for evaluation or export. Collective, blocking."""
        return self.transport.all_reduce(self.x, self.r).mean(torch.empty_like(self.x))

    def finish(self) -> None:
        super().finish()
        for hook in self._hooks:
            hook.remove()

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None and issubclass(kind, SystemExit) and self.n > 1:
            self._leave(error[0])
        super().__exit__(kind, *error)

    def _leave(self, error: SystemExit) -> None:
        """sys.exit is no exception that Python reports: without this the others would wait."""
        from ..transport.mpi import end_job, world

        if error.code not in (None, 0):
            said = "" if isinstance(error.code, int) else f": {error.code}"
            code = error.code if isinstance(error.code, int) else 1
            end_job(world(), f"rank {self.rank} exits, the job ends{said}\n", code)

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
        check_wire(self.algorithm, self.transport.wire, self.flat.dtype)

    def _check_same_model(self, sync: bool) -> None:
        transport = self.transport
        graph = f"{transport.topology.name}:{transport.topology.digest()}"
        asked = (
            self.algorithm, transport.wire, transport.late, f"sync={sync}",
            f"all_reduce={transport.all_reduce_by}", f"pieces={transport.largest_message_bytes}",
            graph,
        )  # fmt: skip
        how = ",".join(map(str, asked)).replace(" ", "")
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
                    f"rank {j} has another model, algorithm or graph than rank 0: {b} instead of "
                    f"{a} ({len(theirs) - 1} tensors against {len(ours) - 1})"
                )

    def _take_rank_zeros_model(self) -> None:
        self.transport.broadcast(self.x)
        inside = {id(slot.tensor) for slot in self.flat.slots}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if id(tensor) not in inside:  # frozen, integer or local: equal at the start, too
                self.transport.broadcast(tensor)
