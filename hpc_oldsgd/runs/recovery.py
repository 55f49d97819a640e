"""`--on-failure shrink`: the survivors of a rank's death go on from their own models.

The round in which an agent dies is not mixed. The survivors revoke what is in flight, agree on the
furthest boundary one of them has computed up to, and whoever is behind takes the local steps it
lacks. There they start the algorithm anew, on the graph for n - 1 agents: correction terms begin
at zero, since those of the dead are gone and only together do they cancel.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import topology
from ..checkpoints.writer import Checkpoints
from ..cli.console import Console
from ..errors import UserError
from ..runtime.agent import Agent
from ..tasks import Task
from ..topology import Topology
from ..training.loop import Training
from ..training.options import TrainOptions
from ..transport.heartbeat import Board
from . import folder as run_folder
from . import resume, session
from .folder import RunFolder


@dataclass(frozen=True)
class Lost:
    """An agent that died; `rank` is the one it had when its job started."""

    rank: int
    host: str
    round: int


class Recovery:
    """Of one rank; every survivor makes the same calls."""

    def __init__(
        self,
        config: TrainOptions,
        task: Task,
        agent: Agent,
        training: Training,
        console: Console,
        folder: RunFolder | None,
        lost: Sequence[dict[str, Any]] = (),
    ) -> None:
        """`lost`: those of the jobs that this one goes on from."""
        self.config, self.task, self.agent, self.training = config, task, agent, training
        self.console = console
        self.folder = folder
        """Where this is rank 0, which may be another rank after a death."""
        self.lost = [Lost(**one) for one in lost]
        self.first_rank = agent.rank
        self._ranks = list(range(agent.n))  # that everybody had at first
        self._hosts = list(agent.transport.hosts)

    def can_mend(self, error: BaseException) -> bool:
        from ..transport.mpi.ulfm import is_death

        return self.config.on_failure == "shrink" and is_death(self.agent.transport, error)

    def run(self) -> None:
        """`training.run()`, over however many deaths."""
        broken = False
        while True:
            try:
                if broken:
                    self.mend()
                self.training.run()
                return
            except Exception as error:
                if not self.can_mend(error):
                    raise
                broken = True

    def finish(self) -> None:
        """Close the agent; all is written by now, so who dies here is not missed."""
        try:
            self.training.control.settle()
            self.agent.finish()
        except Exception as error:
            if not self.can_mend(error):
                raise
            self.agent.transport.engine.stop()

    def mend(self) -> None:
        """Collective among the living. Another death meanwhile raises again: mend again."""
        from ..transport.mpi import ulfm

        start = time.perf_counter()
        agent, training, transport = self.agent, self.training, self.agent.transport
        keeper = training.checkpoints
        assert keeper is not None
        transport.status.set("repairing the graph")
        keeper.abandon()
        alive = ulfm.shrink(transport)
        told = [json.loads(text) for text in transport.gather_text(json.dumps(self._tell()))]
        r, t, tau = max((one["r"], one["t"], one["tau"]) for one in told)
        name, graph = repaired(self.config, len(alive))
        if transport.rank == 0:
            keeper.forget(r)
        ulfm.rebuild(transport, graph)
        self._note([one["rank"] for one in told], r)
        training.set_tau(tau)
        while agent.t < t:
            training.gradients()
            agent.local_step()
        agent.stand_at(r)
        data = self._share_out([one["agent"] for one in told])
        training.regroup(transport.rank)
        config = dataclasses.replace(self.config, topology=name)
        who = resume.identity("train", config, agent.algorithm, self.task, graph, agent.model)
        about = {"run": who, "data": data, "lost": self.describe()}
        keeper.regroup(transport.rank, transport.n, about)
        if transport.board is not None:
            transport.board.close()
            transport.board = Board(
                keeper.run, transport.rank, transport.n, transport.status, self.config.timeout
            )
        self._take_over(r, keeper)
        training.say(self._story(graph, r, t, time.perf_counter() - start))
        agent.begin_anew()

    def _take_over(self, r: int, keeper: Checkpoints) -> None:
        """The files and the console are the new rank 0's; a row of round r is made anew."""
        training = self.training
        own = [row for row in training.rows if row["round"] < r]
        training.rows[:] = own
        if self.agent.rank != 0:
            return
        written = run_folder.read_rows(keeper.run, r)
        known = {row["round"] for row in written}
        training.rows[:] = written + [row for row in own if row["round"] not in known]
        if self.folder is None:
            self.console.shown = True
            self.console.start(training.iterations)
        else:
            self.folder.close()
        self.folder = RunFolder(keeper.run, self.config.tensorboard, training.rows)
        training.on_row = session.on_row(self.console, self.folder)
        keeper.before_commit = self.folder.sync

    def describe(self) -> list[dict[str, Any]]:
        """For summary.json and the manifests of checkpoints."""
        return [dataclasses.asdict(one) for one in self.lost]

    def _tell(self) -> dict[str, int]:
        agent = self.agent
        r, t = agent.next_boundary
        return {
            "rank": self.first_rank,
            "agent": self.training.workers[0].shard.i,
            "r": r,
            "t": t,
            "tau": agent.algorithm.tau,
        }

    def _note(self, ranks: list[int], r: int) -> None:
        gone = [j for j in self._ranks if j not in ranks]
        self.lost += [Lost(j, self._hosts[j], r) for j in gone]
        self._ranks = ranks

    def _share_out(self, agents: list[int]) -> dict[str, Any]:
        """With --redistribute all data is dealt anew; else everybody keeps what it has."""
        if self.config.redistribute:
            rank, n = self.agent.rank, self.agent.n
            shard = self.task.shard(rank, n, self.config.partition, self.config.seed)
            self.training.workers[0].shard, self.training.data_of = shard, n
            agents = list(range(n))
        return {"of": self.training.data_of, "agents": agents}

    def _story(self, graph: Topology, r: int, t: int, seconds: float) -> str:
        gone = [one for one in self.lost if one.round == r]
        who = ", ".join(f"rank {one.rank} ({one.host})" for one in gone)
        data = "dealt anew to the others" if self.config.redistribute else "lost"
        return (
            f"{who} died: {graph.n} agents go on from round {r}, iteration {t}, "
            f"on {graph.name} (p = {graph.p:.3g}); its data is {data}; repaired in {seconds:.2f} s"
        )


def repaired(config: TrainOptions, n: int) -> tuple[str, Topology]:
    """The same kind of graph for n agents; a ring where there is none of that kind."""
    for name in (config.topology, config.topology.partition(":")[0]):
        try:
            return name, session.make_topology(dataclasses.replace(config, topology=name), n)
        except UserError:
            continue
    return "ring", topology.from_name("ring", n, weights=config.weights)
