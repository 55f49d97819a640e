"""Whatever a command line holds: it can be used, or is refused in one sentence. See `make fuzz`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_oldsgd import algorithms, cli, tasks
from hpc_oldsgd.data import parse as parse_partition
from hpc_oldsgd.simulation.clock import Clock
from hpc_oldsgd.training.options import SimulateOptions, TrainOptions
from support.random_input import cases, numbers, refused_or

WORDS = st.one_of(
    st.sampled_from(["0", "1", "-1", "3", "0.5", "nan", "inf", "1e400", "", "ring", "auto", "x:y"]),
    st.text(max_size=6),
    numbers,
)
KNOWN = {"algorithm": algorithms.registry(), "task": tasks.registry()}
OPTIONS = sorted(cli.flags(TrainOptions) | cli.flags(SimulateOptions) | {"--tau", "--beta", "-q"})


@cases
@given(
    st.sampled_from([TrainOptions, SimulateOptions]),
    st.lists(st.tuples(st.sampled_from(OPTIONS) | st.text(max_size=8), WORDS), max_size=3),
    st.sampled_from(algorithms.names()),
)
def test_command_lines(kind: Any, pairs: list[tuple[str, str]], algorithm: str) -> None:
    argv = ["--algorithm", algorithm, *(word for pair in pairs for word in pair)]
    if {"-h", "--help"}.intersection(argv):
        return
    parsed = refused_or(lambda: cli.parse_staged(kind, KNOWN, argv))
    if parsed is not None and kind is SimulateOptions and parsed[0].agents < 50:
        refused_or(parsed[0].speeds)


fields = {
    "alpha": st.none() | st.floats(), "iterations": st.none() | st.integers(),
    "momentum": st.floats(), "weight_decay": st.floats(), "seed": st.integers(),
    "eval_every": st.integers(), "eval_samples": st.integers(), "keep": st.integers(),
    "checkpoint_every": st.integers(), "checkpoint_seconds": st.floats(),
    "partition": st.sampled_from(["iid", "label:nan", "label:0.5", "dirichlet:inf", "x"])
    | st.text(max_size=9), "resume": st.sampled_from(["never", "auto", "x"]),
    "overwrite": st.booleans(), "resume_average": st.booleans(), "agents": st.integers(-2, 20),
    "slow": st.lists(st.sampled_from(["1:2", "0:nan", "0:inf", "99:1", "1:-1", ":", "1:0"]))
    .map(tuple), "c": st.floats(), "jitter": st.floats(), "threads": st.integers(),
    "target": st.none() | st.floats(), "late_wait": st.floats(), "staleness": st.integers(),
    "late": st.sampled_from(["wait", "reuse"]), "optimizer": st.sampled_from(["sgd", "adamw"]),
}  # fmt: skip


@cases
@given(st.fixed_dictionaries({}, optional=fields), st.floats() | st.just(3.0))
@example({"alpha": 1e39}, 1.0)
@example({"weight_decay": 1e300, "optimizer": "adamw"}, 1.0)
@example({"momentum": 1e200}, 1.0)
@example({"threads": -1}, float("nan"))
def test_options(given_fields: dict[str, Any], timeout: float) -> None:
    """What is accepted can be used: an optimizer steps, the clock and the speeds are made."""
    config = refused_or(lambda: SimulateOptions(**given_fields))
    if config is None:
        return
    parse_partition(config.partition)
    for name in ("alpha", "momentum", "weight_decay", "checkpoint_seconds", "threads", "late_wait"):
        value = getattr(config, name)
        assert value is None or 0 <= value < float("inf") or name == "late_wait"
    assert config.target is None or 0 < config.target < float("inf")
    common = {k: v for k, v in given_fields.items() if k not in ("agents", "c")}
    over_mpi = refused_or(lambda: TrainOptions(timeout=timeout, **common))
    assert over_mpi is None or 0 <= over_mpi.timeout < float("inf")
    model = torch.nn.Linear(2, 1)
    optimizer = config.make_optimizer(model, config.alpha or 0.1)
    for _ in range(2):  # momentum counts from the second on
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    def clock() -> Clock:
        speed = np.array(config.speeds())
        return Clock(config.agents, config.c, speed, config.jitter, False, config.seed)

    made = refused_or(clock)
    if made is not None:
        made.compute()
        assert np.isfinite(made.t).all() and (made.t >= 0).all()


@cases
@given(st.text(max_size=12), st.integers(0, 6), st.integers(0, 30))
@example("dirichlet:1e-300", 3, 20)
@example("dirichlet:1e308", 3, 20)
def test_partitions(text: str, n: int, samples: int) -> None:
    labels = np.arange(samples) % 3
    parts = refused_or(lambda: parse_partition(text).split(labels, n))
    if parts is not None:
        assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
        assert all(len(part) for part in parts)
