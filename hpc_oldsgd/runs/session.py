"""One run from its options to its summary, the same for `train`, `simulate`, studies and tests.

Everything is made in constructors, each part from the parts before it:

    options                        the same on all ranks, or nothing is made
    topology, models, identity     by each process for itself, then agreed in one collective
    plan                           which checkpoint to go on from, agreed by all
    data, state                    by each process for itself, then agreed in one collective
    runner                         the agents; over MPI the first messages leave
    folder                         last of all that may be refused, so nothing is removed in vain
    checkpoints, loop              the rounds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoints.mean import layout
from ..checkpoints.store import folder_name
from ..checkpoints.writer import Checkpoints, Policy
from ..cli.console import Console
from ..errors import Diverged, NotSaved, Stopped, UserError
from ..runtime.flat import check_trainable
from ..runtime.votes import Control
from ..tasks import seed_model
from ..training import plan as plans
from ..training.loop import Training, Worker
from ..training.signals import Inbox
from . import agreement, resume
from .backend import Backend
from .folder import RunFolder, environment
from .identity import described, identity
from .report import Report, summarise, wall_s
from .resume import Plan
from .spec import Spec, make_graphs, make_topology

NOWHERE = Plan(Path())
SMALL = 1_000_000  # numbers: the threads of a smaller model wait longer than they compute


class Session:
    """A run that is ready to go; `run()` takes it to its end."""

    def __init__(
        self,
        spec: Spec[Any],
        backend: Backend,
        console: Console | None = None,
        *,
        in_folder: bool = True,
        signals: Inbox | None = None,
        on_step: Callable[[int], None] = lambda t: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Without `in_folder` nothing is written, resumed or saved.

        `on_step` is called after every step, `on_end` when all flights have ended.
        """
        console = console or Console("", shown=False)
        self.spec, self.backend, self.in_folder, self._on_end = spec, backend, in_folder, on_end
        agreement.check_options(spec, backend.gather)
        parts = backend.check(lambda: Parts(spec, backend, in_folder))
        self.models = parts.models
        self.plan = NOWHERE
        if in_folder:
            self.plan = resume.make_plan(
                spec.options, parts.identity, backend.n,
                lambda found: backend.parts_of(found, spec.options.resume_average),
                backend.gather, console.say,
            )  # fmt: skip
        start = backend.check(lambda: Start(spec, backend, self.plan, self.models))
        agreement.check_data(spec.task, backend.gather)
        optimizers = [spec.options.make_optimizer(model, spec.alpha) for model in self.models]
        self.chosen = self._choose(parts, start)
        algorithm = spec.algorithm
        if self.chosen is not None:  # whoever asks later finds what was chosen
            algorithm = self.chosen.apply(algorithm)
            spec.options.topology, spec.options.wire = self.chosen.topology, self.chosen.wire
        self.topology = parts.graphs[spec.options.topology]
        self.runner = backend.make_runner(self.models, optimizers, algorithm, self.topology)
        history, folder = self._open_folder(start.state)
        with backend.alone():
            if console.prog and self.runner.transport.streams is not None:
                self.runner.transport.streams.lost.tell = console.warn
            self.report = Report(console, folder)
            # An agent that may run ahead of its neighbours must not wait for their votes instead.
            late = spec.options.late_policy()
            control = Control(self.runner.transport, 1 + late.staleness if late else 1)
            same = zip(backend.here, self.models, optimizers, start.shards, strict=True)
            workers = [Worker(*each) for each in same]
            self.loop = Training(
                spec.options, spec.task, self.runner, workers, spec.iterations,
                control=control,
                checkpoints=self._make_checkpoints(parts, start, control) if in_folder else None,
                rows=history, data_of=start.data_of,
                vmap=backend.make_vmap(spec.task, workers),
                slowdown=backend.make_slowdown(self.runner), signals=signals,
                on_row=self.report.row, on_step=both(console.step, on_step), say=console.say,
            )  # fmt: skip
            backend.ready(self)
            self.title = self._make_title()
            self._tell()
            self._go_on_from(start.state)
            if self.plan.resumes is not None and spec.options.choice:
                self.report.config(self._config)

    def run(self) -> list[dict[str, Any]]:
        """To the end: the rows. Raises Diverged, Stopped or NotSaved, in every process alike."""
        backend, loop, ended, unsaved = self.backend, self.loop, None, ""
        with backend.alone():
            try:
                backend.run(self)
            except Diverged as error:
                ended = error
            backend.finish(self)
            self.report.console.close()
            self._on_end()
            if ended is None and not loop.stopped:
                told = summarise(loop.rows, self.spec.task, self.title, backend.time_unit)
                lost = {"not_saved": "the last checkpoint"} if self._checkpoint_problem() else {}
                self.report.summary({**told, **backend.about_end(), **lost})
                unsaved = self._unsaved()
            self.report.close()
        unsaved = backend.leave(unsaved)
        why = ended or self._stopped() or (NotSaved(unsaved) if unsaved else None)
        if why is not None:
            why.local = backend.took_over
            raise why
        return loop.rows

    # -- the constructor's steps ---------------------------------------------------------------

    def _choose(self, parts: Parts, start: Start) -> plans.Plan | None:
        """--auto is answered once: a resumed run keeps its plan. Collective."""
        if not self.spec.options.choice:
            return self.spec.plan
        if self.plan.resumes is not None:
            return self.backend.check(lambda: self._plan_of_old(parts))
        return self.backend.choose(self.spec, parts.graphs, self.models[0], start.shards[0])

    def _plan_of_old(self, parts: Parts) -> plans.Plan:
        """With the tau that the run had last. Its fragments are in its state."""
        found, options, tau = self.plan.resumes, self.spec.options, self.spec.algorithm.tau
        assert found is not None
        made = plans.Plan(options.topology, options.wire, tau, 1)  # of an older version
        if "plan" in found.manifest:
            try:
                made = plans.from_dict(found.manifest["plan"])
            except (TypeError, ValueError):
                raise UserError(f"{found.folder}: the plan in its manifest is damaged") from None
        if made.topology not in parts.graphs:  # agents have died since, and another graph fitted
            graph = make_topology(replace(options, topology=made.topology), self.backend.n)
            parts.graphs[made.topology] = graph
        tau = found.manifest["tau"] if "tau" in options.choice else tau
        return replace(made, tau=tau, fragments=min(made.fragments, tau))

    def _open_folder(
        self, state: dict[str, Any] | None
    ) -> tuple[list[dict[str, Any]], RunFolder | None]:
        """The rows that the run goes on from, and the folder, where this process writes it."""

        def open_it() -> tuple[list[dict[str, Any]], RunFolder | None]:
            if state is not None and (odd := resume.misfit(state, self.runner, self.models)):
                found = self.plan.path if self.plan.found is None else self.plan.found.folder
                raise UserError(f"the {odd} in {found} does not fit this run")
            if not (self.in_folder and self.backend.first):
                return [], None
            history, options = self.plan.take(), self.spec.options
            config, clear = self._config(), self.plan.clear
            return history, RunFolder(self.plan.path, options.tensorboard, history, config, clear)

        try:
            return self.backend.check(open_it)
        except UserError:  # in all processes alike
            self.runner.finish()
            raise

    def _make_checkpoints(self, parts: Parts, start: Start, control: Control) -> Checkpoints:
        options, backend = self.spec.options, self.backend
        return Checkpoints(
            self.plan.path,
            self.runner.transport,
            control,
            Policy(options.checkpoint_every, options.checkpoint_seconds, options.keep),
            part=backend.part,
            count=backend.parts,
            about={
                "run": parts.identity,
                "alpha": self.spec.alpha,
                "bn": options.bn,
                "layout": layout(self.models[0], self.runner.flat),
                "data": {"of": start.data_of, "agents": start.agents},
                "lost": self.plan.lost,
                **({} if self.chosen is None else {"plan": self.chosen.as_dict()}),
            },
            last=self.plan.found.folder if self.plan.here and self.plan.found else None,
            before_commit=self.report.sync,
        )

    def _make_title(self) -> str:
        spec, algorithm = self.spec, self.runner.algorithm
        parts = f"P = {algorithm.P}, " if algorithm.P > 1 else ""
        wire = spec.options.wire
        parts += f"wire {wire}, " if wire != "same" else ""
        return (
            f"{algorithm.name}, {self.topology.name}, n = {self.backend.n}, tau = {algorithm.tau}, "
            f"{parts}{self.backend.title}alpha = {spec.alpha:g}, {spec.task.name}, "
            f"{spec.options.partition}"
        )

    def _config(self) -> dict[str, Any]:
        spec = Spec(self.spec.options, self.runner.algorithm, self.spec.task)
        topology = self.topology
        return {
            **described(spec, self.backend.n),
            "iterations": spec.iterations,
            "topology": {"name": topology.name, "lambda_2": topology.lambda_2, "p": topology.p},
            **({} if self.chosen is None else {"plan": self.chosen.as_dict()}),
            **self.backend.about_transport(self.runner),
            "environment": environment(),
        }

    def _tell(self) -> None:
        d = self.runner.x.shape[-1]
        headline = f"{self.title}; {d:,} parameters{self.backend.where}"
        tau, asked = self.runner.algorithm.tau, self.spec.options.iterations
        whole = -(-self.spec.iterations // tau) * tau
        self.report.start(headline, whole)
        if asked and asked != whole and "tau" not in self.spec.options.choice:
            self.report.console.say(
                f"--iterations {asked} ends inside a round of tau = {tau}: the run takes {whole}"
            )
        if self.chosen is not None and self.spec.options.choice and self.plan.resumes is None:
            what = ", ".join(f"{k} = {v}" for k, v in self._chosen_values().items())
            self.report.console.say(f"{what} chosen: {self.chosen.reason}")

    def _chosen_values(self) -> dict[str, Any]:
        algorithm, options = self.runner.algorithm, self.spec.options
        known = {"topology": options.topology, "wire": options.wire, "tau": algorithm.tau,
                 "fragments": algorithm.P}  # fmt: skip
        return {name: known[name] for name in plans.KEYS.values() if name in options.choice}

    def _go_on_from(self, state: dict[str, Any] | None) -> None:
        """Put the run where its checkpoint was. Collective."""
        found, alpha = self.plan.resumes, self.spec.alpha
        if found is None or state is None:
            return
        self.loop.load_state_dict(state, save=not self.plan.here)
        self.report.console.go_on(
            state["elapsed"] if self.backend.time_unit == "s" else wall_s(self.loop.rows)
        )
        told = f"goes on from round {found.r}, iteration {self.runner.t}"
        told += "".join(f", with {k} {v}" for k, v in self._chosen_values().items())
        if alpha != found.manifest["alpha"]:
            told += f", with alpha {alpha:g} instead of {found.manifest['alpha']:g}"
        self.loop.say(told)

    def _unsaved(self) -> str:
        """What a complete run could not write; told by the process that writes the folder."""
        missing = dict(self.report.unsaved)
        if problem := self._checkpoint_problem():
            missing["the last checkpoint"] = problem
        if not missing:
            return ""
        *names, last = missing
        return (
            f"the run is complete but could not write {', '.join(names)}{' and ' * bool(names)}"
            f"{last}: {missing[last]}; make room and go on with --resume auto --out "
            f"{self.plan.path}"
        )

    def _checkpoint_problem(self) -> str:
        """Why the last round has no checkpoint; known where part 0 is written."""
        checkpoints = self.loop.checkpoints
        if checkpoints is None or checkpoints.part != 0:
            return ""
        kept = checkpoints.last.name if checkpoints.last else ""
        return "" if kept == folder_name(self.runner.r) else checkpoints.problem or "writing failed"

    def _stopped(self) -> Stopped | None:
        loop = self.loop
        if not loop.stopped:
            return None
        checkpoints = loop.checkpoints
        last = None if checkpoints is None else checkpoints.last
        saved = "none" if last is None else last.name
        return Stopped(
            f"stopped by a signal after iteration {self.runner.t} of {loop.iterations}, the last "
            f"checkpoint is {saved}: go on with --resume auto --out {self.plan.path}"
        )


def both(first: Callable[[int], None], second: Callable[[int], None]) -> Callable[[int], None]:
    def call(t: int) -> None:
        first(t)
        second(t)

    return call


class Parts:
    """What each process makes for itself, before anything is agreed on. Raises UserError."""

    def __init__(self, spec: Spec[Any], backend: Backend, in_folder: bool) -> None:
        options = spec.options
        self.graphs = make_graphs(options, backend.n)
        for graph in self.graphs.values():
            spec.check(graph)
        backend.prepare(spec.algorithm, self.graphs)
        self.models: list[nn.Module] = []
        for _ in backend.here:  # everybody starts from the same model, over MPI from rank 0's
            seed_model(options.seed)
            model = spec.task.model()
            check_trainable(model)  # before an optimizer trips over it
            self.models.append(model.to(backend.device))
        size = sum(p.numel() for p in self.models[0].parameters())
        backend.set_threads(options.threads or int(size < SMALL))
        if spec.plan is not None:
            spec.plan.check(backend.n, spec.algorithm.name, plans.size_of(self.models[0]))
        self.identity: dict[str, Any] = {}
        if in_folder:
            first = next(iter(self.graphs.values()))
            self.identity = identity(backend.kind, spec, first, self.models[0])
            if backend.first:
                resume.claim_folder(options)


class Start:
    """Data and, where the run goes on, its state: read before anything is removed for it."""

    def __init__(
        self, spec: Spec[Any], backend: Backend, plan: Plan, models: Sequence[nn.Module]
    ) -> None:
        options, task = spec.options, spec.task
        if backend.first:  # an Agent takes rank 0's model
            resume.take_mean(plan, *models)
        self.state = resume.read(plan, backend.part, models[0], spec.alpha)
        self.agents, self.data_of = plan.data(backend.n)
        here = [self.agents[i] for i in backend.here]
        self.shards = task.shards(here, self.data_of, options.partition, options.seed)
        task.train_sample(options.eval_samples)  # kept for the rows
        task.test_set(options.eval_samples)
