"""`--on-failure shrink`: the survivors of a rank's death go on from their own models.

The round in which an agent dies is not mixed. The survivors revoke what is in flight, agree on the
furthest boundary one of them has computed up to, and whoever is behind takes the local steps it
lacks. There they start the algorithm anew, on the graph for n - 1 agents: correction terms begin
at zero, since those of the dead are gone and only together do they cancel.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import topology
from ..errors import UserError
from ..runtime.agent_runner import AgentRunner
from ..topology import Topology
from ..training.options import TrainOptions
from ..transport.mpi import ulfm
from .claim import claim
from .folder import RunFolder, rows_before
from .identity import identity
from .spec import Spec, make_topology

if TYPE_CHECKING:
    from .session import Session


@dataclass(frozen=True)
class Lost:
    """An agent that died; `rank` is the one it had when its job started."""

    rank: int
    host: str
    round: int


@dataclass
class Roll:
    """Who has died in this job, as one rank knows it.

    A repair that the next death interrupts may be complete on some ranks and not on others, so each
    tells what it knows. All that have completed a repair know the same.
    """

    hosts: list[str]
    """Of all ranks that the job had at first."""
    lost: list[Lost] = field(default_factory=list)

    def meet(self, told: list[dict[str, Any]]) -> tuple[int, int, int]:
        """From what every survivor has told: the round, iteration and tau all go on from."""
        r, t, tau = max((one["r"], one["t"], one["tau"]) for one in told)
        self.lost = [Lost(**one) for one in max((one["lost"] for one in told), key=len)]
        known = {one.rank for one in self.lost} | {one["rank"] for one in told}
        gone = [j for j in range(len(self.hosts)) if j not in known]
        self.lost += [Lost(j, self.hosts[j], r) for j in gone]
        return r, t, tau


class Recovery:
    """Of one rank; every survivor makes the same calls."""

    def __init__(self, session: Session, options: TrainOptions, agent: AgentRunner) -> None:
        self.session, self.options, self.agent = session, options, agent
        self.loop, self.transport = session.loop, agent.transport
        self.first_rank = agent.rank
        self._lost_before = [Lost(**one) for one in session.plan.lost]
        self._roll = Roll(list(agent.transport.hosts))

    @property
    def lost(self) -> list[Lost]:
        """Also those of the jobs that this one goes on from."""
        return [*self._lost_before, *self._roll.lost]

    def can_repair(self, error: BaseException) -> bool:
        return self.options.on_failure == "shrink" and ulfm.is_death(self.transport, error)

    def run(self) -> None:
        """The training loop, over however many deaths."""
        broken = False
        while True:
            try:
                if broken:
                    self.repair()
                self.loop.run()
                return
            except Exception as error:
                if not self.can_repair(error):
                    raise
                broken = True

    def finish(self) -> None:
        """Close the agent. All is written by now: the death of another rank does no harm."""
        try:
            self.loop.control.settle()
            self.agent.finish()
        except Exception as error:
            if not self.can_repair(error):
                raise
            self.transport.engine.stop()

    def repair(self) -> None:
        """Collective among the living. Another death meanwhile raises again: repair again."""
        start = time.perf_counter()
        agent, loop, transport = self.agent, self.loop, self.transport
        checkpoints = loop.checkpoints
        assert checkpoints is not None
        transport.status.set("repairing the graph")
        checkpoints.abandon()
        alive = ulfm.shrink(transport)
        if transport.rank == 0:  # the lock of a dead rank 0 is free; nobody writes before this
            claim(checkpoints.run)
        told = [json.loads(text) for text in transport.gather_text(json.dumps(self._own_state()))]
        r, t, tau = self._roll.meet(told)
        name, graph = repaired(self.options, len(alive))
        if transport.rank == 0:
            checkpoints.forget(r)
        ulfm.rebuild(transport, graph)
        loop.set_tau(tau)
        while agent.t < t:
            loop.gradients()
            agent.local_step()
        agent.stand_at(r)
        data = self._assign_data([one["agent"] for one in told])
        loop.regroup(transport.rank, self._rows_before(r, checkpoints.run))
        spec = Spec(replace(self.options, topology=name), agent.algorithm, loop.task)
        who = identity("train", spec, graph, agent.model)
        about = {"run": who, "data": data, **self.about()}
        if self.session.chosen is not None:
            about["plan"] = replace(self.session.chosen, topology=name, agents=graph.n).as_dict()
        checkpoints.regroup(transport.rank, transport.n, about)
        transport.watch(checkpoints.run)
        if transport.rank == 0:
            folder = RunFolder(checkpoints.run, self.options.tensorboard, loop.rows)
            self.session.report.take_over(folder, loop.iterations)
        loop.say(self._message(graph, r, t, time.perf_counter() - start))
        agent.begin_anew()

    def _rows_before(self, r: int, run: Path) -> list[dict[str, Any]]:
        """A row of round r is made anew; the rank that is first now knows also those on disk."""
        own = [row for row in self.loop.rows if row["round"] < r]
        if self.transport.rank != 0:
            return own
        written = rows_before(run, r)
        known = {row["round"] for row in written}
        return written + [row for row in own if row["round"] not in known]

    def about(self) -> dict[str, Any]:
        """For summary.json and the manifests of checkpoints."""
        return {"lost": [asdict(one) for one in self.lost]}

    def _own_state(self) -> dict[str, Any]:
        agent = self.agent
        r, t = agent.next_boundary
        return {
            "rank": self.first_rank,
            "agent": self.loop.workers[0].shard.i,
            "r": r,
            "t": t,
            "tau": agent.algorithm.tau,
            "lost": [asdict(one) for one in self._roll.lost],
        }

    def _assign_data(self, agents: list[int]) -> dict[str, Any]:
        """With --redistribute all data is dealt anew. Otherwise each agent keeps its own."""
        options, loop = self.options, self.loop
        if options.redistribute:
            rank, n = self.agent.rank, self.agent.n
            loop.take_data(loop.task.shard(rank, n, options.partition, options.seed), n)
            agents = list(range(n))
        return {"of": loop.data_of, "agents": agents}

    def _message(self, graph: Topology, r: int, t: int, seconds: float) -> str:
        gone = [one for one in self._roll.lost if one.round == r]
        who = ", ".join(f"rank {one.rank} ({one.host})" for one in gone)
        data = "dealt anew to the others" if self.options.redistribute else "lost"
        return (
            f"{who} died: {graph.n} agents go on from round {r}, iteration {t}, "
            f"on {graph.name} (p = {graph.p:.3g}); its data is {data}; repaired in {seconds:.2f} s"
        )


def repaired(options: TrainOptions, n: int) -> tuple[str, Topology]:
    """The same kind of graph for n agents; a ring where there is none of that kind."""
    for name in (options.topology, options.topology.partition(":")[0]):
        try:
            return name, make_topology(replace(options, topology=name), n)
        except UserError:
            continue
    return "ring", topology.from_name("ring", n, weights=options.weights)
