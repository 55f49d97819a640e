"""One MPI rank's model and optimizer under an algorithm: what `train` runs, and what Agent is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from ..algorithms import Algorithm
from ..errors import UserError
from ..launch import deadline
from ..topology import Topology
from ..transport.base import Wire
from ..transport.narrow import Narrow, check_memory
from ..transport.trace import Trace
from .agent_checks import (
    a_topology,
    an_algorithm,
    check_optimizer,
    check_options,
    check_trained,
    followed,
)
from .flat import Buffers, Flat, Slot, mixed_types
from .other_types import OtherTypes, flatten
from .runner import Runner
from .running_statistics import running_statistics
from .sgd import Optimizer, one_alpha
from .unread_gradient import UNREAD
from .wire import check_form, check_wire, wire_type

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..transport.mpi import MpiTransport


class AgentRunner(Runner):
    """Its x is the memory of a model's parameters, and `descend` a torch optimizer's step."""

    transport: MpiTransport
    others: OtherTypes
    several_types = False
    """Whether tensors of another type than x are mixed beside it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        algorithm: Algorithm | str = "oldsgd",
        topology: Topology | str = "ring",
        comm: MPI.Comm | None = None,
        *,
        buffers: Buffers = "mix",
        sync: bool | None = True,
        wire: Wire | str = None,
        trace: Trace | None = None,
        timeout_s: float | None = 600.0,
        **transport_options: Any,
    ) -> None:
        with deadline.limit_start("Agent", timeout_s):
            from ..transport.mpi import MpiTransport, Startup, world
        comm = world() if comm is None else comm
        startup = self._startup = Startup(comm, timeout_s)
        algorithm = an_algorithm(algorithm)
        topology = a_topology(topology, comm.size)
        check_options(transport_options, algorithm, MpiTransport)
        self.model, self.optimizer = model, optimizer
        self.buffers = buffers
        self.flat = startup.check(self._flatten)
        transport = MpiTransport(
            comm, topology, wire=wire_type(wire, self.flat.dtype), trace=trace,
            timeout_s=timeout_s, **transport_options,
        )  # fmt: skip
        startup.comm = transport.comm  # from here on no message meets the user's
        tail = running_statistics([self.flat])
        super().__init__(self.flat.x, algorithm, transport, trace, tail)
        self.others.attach(self)
        try:
            startup.check(self._check_optimizer)
            self._check_same_model(sync is not False)
        except UserError:  # on all ranks alike
            transport.close()
            raise
        self._outside_before = list(self.flat.outside())
        self._start_from(sync)
        self._hooks: list[RemovableHandle] = []
        self._poll_in_backward()
        self.observers.append(lambda _: self._look_after_model())
        self.start()

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def alpha(self) -> float:
        return one_alpha(self.optimizer)

    def step(self) -> bool:
        for flat in (self.flat, *self.others.flats):
            flat.adopt()
        return self.advance(self.flat.gradient() if self.algorithm.reads_gradient else UNREAD)

    def descend(self, g: Tensor) -> None:
        if g is not UNREAD:
            own = self.flat.gradient()
            if g is not own:
                own.copy_(g)
        self.optimizer.step()
        self._left_memory.check(self.optimizer)
        increment_version(self.x)  # it changed x through the parameters, which count for themselves
        self.others.advance()

    def version(self) -> int:
        return self.flat.version()

    def local_step(self) -> None:
        """After `loss.backward()`: an optimizer step outside of any round."""
        if self.algorithm.reads_gradient:
            self.flat.gradient()
        self.optimizer.step()
        self.t += 1

    def finish(self) -> None:
        super().finish()
        self.others.drop()
        self._remove_hooks()

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
        state = {**super().state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.others.flats and state["algorithm"]:
            state["beside"] = self.others.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.others.load_state_dict(state.get("beside", {}))
        super().load_state_dict(state)

    def _poll_in_backward(self) -> None:
        transport = self.transport
        if transport.progress == "poll":
            for slot in self.flat.parameters:
                tensor: Any = slot.tensor
                hook = tensor.register_post_accumulate_grad_hook(lambda _: transport.poll())
                self._hooks.append(hook)

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _flatten(self) -> Flat:
        with followed(self.model, self.optimizer) as self._left_memory:
            if self.several_types:
                types = mixed_types(self.model, self.buffers)
                flat, self.others = flatten(self.model, self.buffers, types)
            else:  # a run's mean model and checkpoints hold one vector
                flat, self.others = Flat(self.model, self.buffers), OtherTypes([])
        return flat

    def _boundary(self) -> bool:
        stops = super()._boundary()
        if not stops:
            self.others.begin()
        return stops

    def _drop(self) -> None:
        super()._drop()
        self.others.drop()

    def _look_after_model(self) -> None:
        """At every boundary, before the next snapshot leaves."""
        if self.flat.adopt():
            increment_version(self.x)
        self.flat.check_views(self.others.slots)
        for other in self.others.flats:
            if other.adopt():
                increment_version(other.x)
            other.check_parameters()
        check_trained(self.optimizer, self.flat)

    def _check_optimizer(self) -> None:
        for flat in (self.flat, *self.others.flats):
            check_optimizer(self.optimizer, flat)
        self.others.check(self.algorithm, self.transport.wire, self.flat)
        check_form(self.algorithm, self.optimizer, self.flat)
        check_wire(self.algorithm, self.transport.wire, self.flat.dtype)
        if isinstance(self.transport.wire, Narrow):
            hosts, i = self.transport.hosts, self.rank
            here = 1 if self.x.is_cuda else hosts.count(hosts[i])
            tensors, graph = self.algorithm.exchanged, self.transport.topology
            check_memory(self.transport.wire, self.x, tensors, graph, i, here)

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

    def _start_from(self, sync: bool | None) -> None:
        """All ranks take rank 0's model, what is frozen, integer or local included."""
        if sync is not False:
            self.transport.broadcast(self.x)
            for _, tensor in self.flat.outside():
                self.transport.broadcast(tensor)

    # -- another set of tensors in x -----------------------------------------------------------

    def lay_out_anew(self) -> None:
        """The model has other trained tensors than before. Collective, at a boundary.

        The optimizer's state belongs to its parameters and stays; the algorithm's moves with them.
        """
        old = [(self.flat, self.algorithm.state_dict())]
        old += [(one.flat, one.algorithm.state_dict()) for one in self.others.each]
        known = {id(tensor) for _, tensor in (*_named(self.flat.slots), *self._outside_before)}
        self._drop()
        self.transport.free_memory()
        self._remove_hooks()
        self.flat = self._startup.check(self._flatten)
        self.x = self.flat.x
        self.others.attach(self)
        self.transport.tail = running_statistics([self.flat])
        self.transport.model = self.x
        self._startup.check(self._check_optimizer)
        self._check_same_model(True)
        for _, tensor in (*_named(self.flat.slots), *self.flat.outside()):
            if id(tensor) not in known:  # a new layer starts alike on all ranks
                self.transport.broadcast(tensor)
        self._outside_before = list(self.flat.outside())
        self._poll_in_backward()
        hooks, self.on_round = self.on_round, []  # those of this boundary have been called
        try:
            self._start_with(old if self.t else [])
        finally:
            self.on_round = hooks

    def _start_with(self, old: list[tuple[Flat, dict[str, Tensor]]]) -> None:
        self.algorithm.load_state_dict({}, like=self.x)
        self.others.load_state_dict({})
        self.start()
        states = [_moved(self.algorithm, self.flat, old)]
        states += [_moved(one.algorithm, one.flat, old) for one in self.others.each]
        if not any(states):
            return
        self._drop()
        self.algorithm.load_state_dict(states[0], like=self.x)
        for one, state in zip(self.others.each, states[1:], strict=True):
            one.algorithm.load_state_dict(state, like=one.x)
        self.start()


def _moved(
    begun: Algorithm, flat: Flat, old: list[tuple[Flat, dict[str, Tensor]]]
) -> dict[str, Tensor]:
    """The state that has begun, with what the tensors had in the old one; nothing if none had."""
    state = {name: value.clone() for name, value in begun.state_dict().items()}
    known = [(was, saved) for was, saved in old if was.dtype == flat.dtype]
    for was, saved in known:
        places = {id(slot.tensor): slot for slot in was.slots}
        for name, value in state.items():
            if value.shape != flat.x.shape:
                value.copy_(saved[name])
                continue
            for slot in flat.slots:
                if id(slot.tensor) in places:
                    slot.view(value).copy_(places[id(slot.tensor)].view(saved[name]))
    return state if known else {}


def _named(slots: list[Slot]) -> list[tuple[str, Tensor]]:
    return [(slot.name, slot.tensor) for slot in slots]
