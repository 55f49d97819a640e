"""What ranks must agree on, in every order of events that hypothesis can think of.

Each machine plays all ranks of a job in one process: it picks which of the possible events happens
next. The decisions are the package's own; messages wait in queues until the machine delivers them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hpc_oldsgd.runs.recovery import Roll
from hpc_oldsgd.runtime.votes import WISHES, Control
from hpc_oldsgd.transport.late import EdgeEnd
from support.random_input import CASES

Event = tuple[Any, ...]
MANY = settings(max_examples=2 * CASES, stateful_step_count=60)


class Machine(RuleBasedStateMachine):
    """One rule: some event that is possible now."""

    def possible(self) -> list[Event]:
        raise NotImplementedError

    def happen(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)

    @rule(data=st.data())
    def next(self, data: st.DataObject) -> None:
        if events := self.possible():
            self.happen(*data.draw(st.sampled_from(events)))

    def run_to_end(self, unwanted: Callable[[Event], bool], most: int = 2000) -> None:
        """Everything that can still happen does, first things first; it must come to an end."""
        for _ in range(most):
            events = [event for event in self.possible() if not unwanted(event)]
            if not events:
                return
            self.happen(*events[0])
        raise AssertionError("it never ends")


class LateEdge(Machine):
    """--late reuse: two ends of an edge, two queues each way, patience that ends at any time."""

    MOST = 12

    @initialize(staleness=st.integers(1, 3), period=st.integers(1, 2))
    def start(self, staleness: int, period: int) -> None:
        self.staleness, self.period = staleness, period
        self.ends = [EdgeEnd(), EdgeEnd()]
        self.snapshots = [0, 0]  # on their way to each end
        self.answers: list[deque[int]] = [deque(), deque()]
        self.used: list[list[bool]] = [[], []]

    def what(self, s: int) -> tuple[int, int]:
        return s % self.period, 0

    def possible(self) -> list[Event]:
        events: list[Event] = []
        for i, end in enumerate(self.ends):
            if self.snapshots[i] and end.awaits_snapshot:
                events.append(("snapshot", i))
            if self.answers[i] and end.awaits_answer:
                events.append(("answer", i))
            if end.s >= 0 and end.used is None:
                events += [("look", i, False), ("look", i, True)]
            elif end.s < self.MOST:
                events.append(("begin", i))
        return events

    def begin(self, i: int) -> None:
        self.ends[i].begin()
        self.snapshots[1 - i] += 1

    def snapshot(self, i: int) -> None:
        self.snapshots[i] -= 1
        self.say(i, self.ends[i].take_snapshot())

    def answer(self, i: int) -> None:
        assert self.ends[i].take_answer(self.answers[i].popleft())

    def look(self, i: int, expired: bool) -> None:
        end = self.ends[i]
        self.say(i, end.decide(expired, self.what(end.s), self.staleness))
        if end.used is not None:
            assert end.used <= (end.snapshots > end.s), "used without having it"
            self.used[i].append(end.used)

    def say(self, i: int, answer: int | None) -> None:
        if answer is not None:
            self.answers[1 - i].append(answer)

    @invariant()
    def both_use_it_or_neither(self) -> None:
        if hasattr(self, "used"):
            assert all(a == b for a, b in zip(*self.used, strict=False)), self.used
            a, b = (end.s for end in self.ends)
            assert abs(a - b) <= self.staleness * self.period + 1

    @invariant()
    def never_left_out_too_often(self) -> None:
        for used in getattr(self, "used", []):
            for phase in range(self.period):
                each = "".join("01"[yes] for yes in used[phase :: self.period])
                assert max(map(len, each.split("1"))) <= self.staleness

    def teardown(self) -> None:
        """Without impatience both come to the end of the last exchange."""
        if not hasattr(self, "ends"):
            return

        def unwanted(event: Event) -> bool:
            return event[0] == "look" and (event[2] or self.undecidable(event[1]))

        self.run_to_end(unwanted)
        assert [end.s for end in self.ends] == [self.MOST] * 2
        assert self.used[0] == self.used[1] and len(self.used[0]) == self.MOST + 1
        assert self.ends[0].left_out == self.ends[1].left_out
        assert not any(self.snapshots) and not any(self.answers)

    def undecidable(self, i: int) -> bool:
        """A look would change nothing."""
        end = self.ends[i]
        refused = end.answers > end.s and not end.neighbour_said_yes
        return not (refused or (end.answered > end.s and end.answers > end.s))


class Votes(Machine):
    """Lagged votes: agents come to boundaries in any order, and wishes at any moment."""

    @initialize(n=st.integers(2, 4), lag=st.integers(1, 3))
    def start(self, n: int, lag: int) -> None:
        self.cast: list[dict[int, Any]] = []  # vote -> agent -> its wishes
        self.agents = [Control(self.transport(i), lag) for i in range(n)]  # type: ignore[arg-type]
        self.decided: list[list[set[str]]] = [[] for _ in range(n)]
        self.asked: list[list[set[str]]] = [[set()] for _ in range(n)]  # before each boundary
        self.n, self.lag = n, lag

    def transport(self, i: int) -> SimpleNamespace:
        votes = iter(range(10**6))

        @contextlib.contextmanager
        def doing(what: str) -> Iterator[None]:
            yield

        def reduce(wishes: Any, how: str) -> SimpleNamespace:
            assert how == "max"
            number = next(votes)
            self.cast += [{} for _ in range(number + 1 - len(self.cast))]
            vote = self.cast[number]
            vote[i] = wishes.copy()

            def result() -> Any:
                assert len(vote) == self.n, "it would wait for ever"
                return np.max(list(vote.values()), axis=0)

            return SimpleNamespace(result=result)

        return SimpleNamespace(reduce=reduce, status=SimpleNamespace(doing=doing))

    def possible(self) -> list[Event]:
        events: list[Event] = []
        for i, decided in enumerate(self.decided):
            if decided and "stop" in decided[-1]:
                continue
            counted = len(decided) - self.lag
            if counted < 0 or len(self.cast[counted]) == self.n:
                events.append(("boundary", i))
            events += [("wish", i, what) for what in WISHES]
        return events

    def wish(self, i: int, what: str) -> None:
        self.agents[i].wish(what)
        self.asked[i][-1].add(what)

    def boundary(self, i: int) -> None:
        self.decided[i].append(self.agents[i].boundary())
        self.asked[i].append(set())

    @invariant()
    def all_decide_alike_and_what_was_asked(self) -> None:
        for decided in getattr(self, "decided", []):
            for b, found in enumerate(decided):
                wanted: set[str] = set()
                if b >= self.lag:
                    wanted.update(*(asked[b - self.lag] for asked in self.asked))
                assert found == wanted, (b, found, wanted)

    def teardown(self) -> None:
        """All stop at the same boundary, and settle with the same answer."""
        if not hasattr(self, "agents"):
            return
        if ("wish", 0, "stop") in self.possible():
            self.wish(0, "stop")
        self.run_to_end(lambda event: event[0] == "wish")
        assert len({len(decided) for decided in self.decided}) == 1
        assert all("stop" in decided[-1] for decided in self.decided)
        settled = [agent.settle() for agent in self.agents]
        assert all(one == settled[0] for one in settled)
        assert not any(agent.settle() for agent in self.agents)


class Agent:
    """Where a rank stands: r and t of the last boundary, and the steps since."""

    def __init__(self, rank: int, tau: int, hosts: list[str]) -> None:
        self.rank, self.tau, self.r, self.t, self.steps = rank, tau, 0, 0, 0
        self.roll = Roll(hosts)

    def tell(self) -> dict[str, Any]:
        r, t = (self.r + 1, self.t + self.tau) if self.steps else (self.r, self.t)
        lost = [asdict(one) for one in self.roll.lost]
        return {"rank": self.rank, "r": r, "t": t, "tau": self.tau, "lost": lost}


class Shrink(Machine):
    """--on-failure shrink: ranks die in any round, also while the others repair the graph."""

    @initialize(n=st.integers(3, 5), tau=st.integers(1, 3))
    def start(self, n: int, tau: int) -> None:
        self.hosts = [f"host-{rank}" for rank in range(n)]
        self.living = {rank: Agent(rank, tau, self.hosts) for rank in range(n)}
        self.dead: list[int] = []
        self.seen: list[int] = []  # deaths that the last whole repair was about

    def possible(self) -> list[Event]:
        living, tau = self.living, next(iter(self.living.values())).tau
        events: list[Event] = []
        if self.dead == self.seen:
            least = min(agent.r for agent in living.values())
            # A round is mixed when all neighbours have come to its top.
            for rank, agent in living.items():
                if agent.steps < tau - 1 or agent.r == least:
                    events.append(("step", rank))
        else:
            events.append(("repair", ()))
        if len(living) > 1:
            events += [("die", rank) for rank in living]
            if self.dead != self.seen:  # one more dies, and some of the others have noticed nothing
                events += [("repair", (rank, done)) for rank in living for done in living]
        return events

    def step(self, rank: int) -> None:
        agent = self.living[rank]
        agent.steps += 1
        if agent.steps == agent.tau:
            agent.r, agent.t, agent.steps = agent.r + 1, agent.t + agent.tau, 0

    def die(self, rank: int) -> None:
        del self.living[rank]
        self.dead.append(rank)

    def repair(self, interrupted: tuple[int, int] | tuple[()]) -> None:
        """With `interrupted`, a rank dies meanwhile, and only ranks up to another one complete."""
        told = [agent.tell() for agent in self.living.values()]
        about, furthest = list(self.dead), max(one["t"] for one in told)
        if interrupted:
            self.die(interrupted[0])
        for agent in self.living.values():
            if not interrupted or agent.rank <= interrupted[1]:
                agent.r, agent.t, agent.tau = agent.roll.meet(told)
                agent.steps = 0
                assert agent.t == furthest, "a gradient is lost, or taken twice"
        if not interrupted:
            self.seen = about

    @invariant()
    def survivors_agree(self) -> None:
        living = list(getattr(self, "living", {}).values())
        if not living or self.dead != self.seen:
            return
        lost = [agent.roll.lost for agent in living]
        assert all(one == lost[0] for one in lost), lost
        assert sorted(one.rank for one in lost[0]) == sorted(self.dead)
        assert all(one.host == self.hosts[one.rank] for one in lost[0])
        rounds = [agent.r for agent in living]
        assert max(rounds) - min(rounds) <= 1


TestLateEdge, TestVotes, TestShrink = LateEdge.TestCase, Votes.TestCase, Shrink.TestCase
for case in (TestLateEdge, TestVotes, TestShrink):
    case.settings = MANY
del case  # pytest would run it once more
