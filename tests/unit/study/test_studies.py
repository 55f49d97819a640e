"""The other studies, tiny: what their tables say against what the clock must give."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from hpc_oldsgd import cli
from hpc_oldsgd.study import __main__ as study
from hpc_oldsgd.study import grid as grids
from hpc_oldsgd.study import scale, scaling, weak

TINY = ["--task", "logistic", "--iterations", "20", "--jobs", "1"]
TARGET = ["--target", "0.2"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: studies share runs."""
    return tmp_path_factory.mktemp("studies")


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def run(out: Path, name: str, *words: str) -> tuple[list[dict[str, str]], str]:
    target = TARGET if name != "convergence" else []
    study.main([name, *TINY, *target, *words, "--out", str(out)])
    folder = out / name
    report = (folder / "report.md").read_text()
    assert "paper" in report and (folder / "report.html").stat().st_size > 10_000
    assert list(folder.glob("*.png")) and list(folder.glob("*.svg"))
    first = sorted(folder.glob("*.csv"))[0]
    return table(first), report


def test_stragglers_turn_the_clock_alone(tmp_path: Path) -> None:
    words = ["--agents", "3", "--tau", "2", "--c", "1", "--factor", "1", "2.5"]
    lines, _ = run(tmp_path, "stragglers", *words, "--algorithm", "oldsgd", "ldsgd")
    at = {(line["algorithm"], line["factor"]): line for line in lines}
    assert float(at["oldsgd", "2.5"]["slowed down"]) == 2.5
    assert float(at["ldsgd", "2.5"]["slowed down"]) == pytest.approx((2 * 2.5 + 1) / 3, rel=0.1)
    assert float(at["oldsgd", "1.0"]["speed-up of OLDSGD"]) == 1
    assert len(list((tmp_path / "runs").iterdir())) == 2, "one run for all factors"
    words = ["--agents", "3", "--partition", "iid", "--tau", "1", "2", "--c", "1"]
    run(tmp_path, "tau", *words, "--algorithm", "oldsgd", "ldsgd")
    assert len(list((tmp_path / "runs").iterdir())) == 4, "two of them are the stragglers' runs"


def test_best_tau_grows_with_c(out: Path) -> None:
    words = ["--agents", "3", "--partition", "iid", "--algorithm", "oldsgd", "ldsgd"]
    lines, _ = run(out, "tau", *words, "--tau", "1", "2", "--c", "0", "50")
    assert [line["c"] for line in lines] == ["0.0", "50.0"]
    for line in lines:
        assert float(line["oldsgd, time"]) <= float(line["ldsgd, time"])
    assert lines[1]["ldsgd, tau"] == "2"


def test_convergence_goes_past_the_target(out: Path) -> None:
    words = ["--agents", "3", "--tau", "2", "--partition", "iid", "--c", "1", "5"]
    lines, report = run(out, "convergence", *words, "--algorithm", "oldsgd", "lugt", "dsgd")
    assert [(r["algorithm"], r["tau"], r["iterations"]) for r in lines] == [
        ("oldsgd", "2", "20"), ("lugt", "2", "20"), ("dsgd", "1", "20"),
    ]  # fmt: skip
    assert [r["time, c = 5"] for r in lines][::2] == ["50.0", "120.0"]
    assert "iid-time-c5.png" in report
    shorter = [*words, "--algorithm", "oldsgd", "--iterations", "9"]  # measured every 4
    assert [r["iterations"] for r in run(out, "convergence", *shorter)[0]] == ["8"]


def test_convergence_draws_runs_that_ended_at_their_target(tmp_path: Path) -> None:
    words = ["--agents", "3", "--tau", "2", "--partition", "iid", "--algorithm", "oldsgd", "ldsgd"]
    run(tmp_path, "speedup", *words)
    runs = sorted((tmp_path / "runs").iterdir())
    lines, _ = run(tmp_path, "convergence", *words, *TARGET)
    assert [int(line["iterations"]) < 20 for line in lines] == [True, True]
    assert sorted((tmp_path / "runs").iterdir()) == runs


def test_scaling_is_against_one_agent(out: Path) -> None:
    lines, report = run(
        out, "scaling", "--agents", "2", "16", "--tau", "2", "--rule", "linear", "--alpha", "0.01"
    )
    assert [line["agents"] for line in lines] == ["1", "2", "16"]
    assert [float(line["alpha"]) for line in lines] == pytest.approx([0.01, 0.02, 0.16])
    assert lines[0]["speed-up, c = 1"] == "1.0"
    assert [line["paper, VGG11"] for line in lines] == ["", "", "14.0"]
    assert "times at 16 agents" in report and "13 times (ResNet18)" in report


def test_scaling_tells_which_graph_is_best(out: Path) -> None:
    graphs = ["ring", "hypercube", "exponential"]
    words = ["--agents", "4", "9", "--tau", "2", "--rule", "linear", "--alpha", "0.02", "--c", "5"]
    lines, report = run(out, "scaling", *words, "--topology", *graphs, "--warmup", "9")
    known = {(line["graph"], line["agents"]): line for line in lines}
    assert ("hypercube", "4") in known and ("hypercube", "9") not in known  # 9 is no power of 2
    made = {json.loads(path.read_text())["agents"]: json.loads(path.read_text())["options"]
            for path in out.glob("runs/*n9*/config.json")}  # fmt: skip
    assert made[9]["warmup"] == 1 and "over 9 iterations" in report
    ring, degree = list(csv.DictReader((out / "scaling" / "which.csv").open()))[-2:]
    assert ring["clock"] == "c = 5" and degree["clock"] == "c = 5, by degree"
    # Two neighbours of a ring take 2 x 5 where an exchange takes 5; tau = 2 hides neither.
    assert number(ring["ring"]) / number(degree["ring"]) == pytest.approx(2, rel=0.02)
    assert "**" in "".join(ring.values())


def number(text: str) -> float:
    return float(text.strip("*"))


@pytest.mark.parametrize(
    ("words", "alpha", "iterations"),
    [
        ([], 0.01, 2000),
        (["--alpha", "0.02", "--iterations", "50"], 0.02, 50),
        (["--options=--alpha 0.02 --iterations 50"], 0.02, 50),
        (["--task", "cifar10-vgg11"], 0.01, 12_000),
    ],
)
def test_scaling_starts_from_the_step_size_it_is_given(
    words: list[str], alpha: float, iterations: int
) -> None:
    grid = grids.Grid(cli.parse(scaling.Options, words))
    assert scaling.start(grid) == (pytest.approx(alpha), iterations)


def test_topologies_by_spectral_gap_and_degree(out: Path) -> None:
    words = ["--agents", "4", "--tau", "2", "--topology", "ring", "complete", "--c", "5"]
    ring, complete = run(out, "topologies", *words)[0]
    assert float(ring["p"]) < float(complete["p"]) == pytest.approx(1)
    assert (ring["neighbours"], complete["neighbours"]) == ("2.0", "3.0")
    assert float(ring["time, by degree, c = 5"]) == 2 * float(ring["time, c = 5"])
    assert float(complete["time, by degree, c = 5"]) == 3 * float(complete["time, c = 5"])


def test_scale_writes_runs_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["scale", "--agents", "8", "32", "--iterations", "20", "--out", str(tmp_path)]
    study.main([*words, "--topology", "ring"])
    lines = table(tmp_path / "scale" / "scale.csv")
    assert len(lines) == 8 and {line["problem"] for line in lines} == {"quadratic", "logistic"}
    times = {line["algorithm"]: float(line["simulated time"]) for line in lines}
    assert times == {"oldsgd": 20, "ldsgd": 40}
    report = (tmp_path / "scale" / "report.md").read_text()
    assert "| problem | algorithm | topology | n = 8 | n = 32 |" in report
    assert re.search(r"8 of 8 runs to go, [\d,]+ gradients, about ", capsys.readouterr().out)
    monkeypatch.setattr(scale, "run", lambda *_: pytest.fail("a finished run is run again"))
    study.main([*words, "--topology", "ring"])
    monkeypatch.undo()
    study.main([*words, "--topology", "ring", "--iterations", "10"])  # beside them
    monkeypatch.setattr(scale, "run", lambda *_: pytest.fail("a finished run was replaced"))
    study.main([*words, "--topology", "ring"])


@pytest.mark.parametrize("problem", [scale.Quadratic, scale.Logistic])
def test_the_best_model_of_a_problem_is_best(problem: type) -> None:
    made = problem(5)
    at = made.loss(made.best)
    for step in 0.05 * np.random.default_rng(3).normal(size=(20, scale.D)):
        assert made.loss(made.best + step) > at
    X = np.tile(made.best, (5, 1))
    mean = np.mean([made.gradient(X, k).mean(0) for k in range(4000)], axis=0)
    assert np.abs(mean).max() < 0.05, "the gradient is that of the loss"


@pytest.mark.slow
def test_weak_scaling_over_real_mpi(tmp_path: Path) -> None:
    own = Path(sys.executable).parent / "mpirun"
    start = f"{shlex.quote(os.environ.get('MPIRUN') or str(own))} -n {{n}}"
    words = ["--ranks", "2", "--rounds", "2", "--grad-seconds", "0.01", "--model-bytes", "4000"]
    study.main(["weak", *words, "--launcher", start, "--out", str(tmp_path)])
    lines = table(tmp_path / "weak" / "weak.csv")
    assert [(r["algorithm"], r["ranks"]) for r in lines] == [("oldsgd", "2"), ("lsgd", "2")]
    for line in lines:
        assert float(line["seconds a round"]) >= 0.05 and line["against the smallest"] == "1.0"


def overlap(n: int, seconds: dict[str, float], rounds: int = 10) -> str:
    settings = {"ranks": n, "tau": 5, "grad_seconds": 0.2, "model_bytes": 1_000_000, "t_g": 0.1,
                "t_c": 0.2, "mpi": "MPICH", "network": "40mbit", "rounds": rounds}  # fmt: skip
    results = [{"algorithm": a, "tau": 5, "round_s": s, "hidden": 1.0} for a, s in seconds.items()]
    return "a table\n" + json.dumps({"results": results, "settings": settings}) + "\n"


def test_weak_reads_what_is_there(tmp_path: Path) -> None:
    options = weak.Options(ranks=(2, 4), out=tmp_path)
    for n, lsgd in ((2, 0.7), (4, 0.84)):
        folder = tmp_path / "runs" / weak.name(options, n)
        folder.mkdir(parents=True)
        (folder / "overlap.txt").write_text(overlap(n, {"oldsgd": 0.5 + n / 1000, "lsgd": lsgd}))
    weak.main(options)
    lines = table(tmp_path / "weak" / "weak.csv")
    assert [r["algorithm"] for r in lines] == ["oldsgd", "oldsgd", "lsgd", "lsgd"]
    assert float(lines[3]["against the smallest"]) == pytest.approx(1.2)
    report = (tmp_path / "weak" / "report.md").read_text()
    assert "- oldsgd: between +0.0% and +0.4%" in report
    assert "- lsgd: between +0.0% and +20.0%" in report
    alone = [r["exchange alone"] for r in lines]
    assert alone == ["0.2", "0.2", "", ""], "an all-reduce is not the exchange that was timed"
    assert "bench/slow_net.sh mpirun N 40mbit python -m hpc_oldsgd.bench overlap" in report
    there = tmp_path / "runs" / weak.name(options, 2)
    assert weak.read(there, weak.Options(tau=7)) is None
    assert weak.name(weak.Options(tau=7), 2) != there.name  # it would be replaced
    (there / "overlap.txt").write_text(overlap(2, {"oldsgd": 0.5, "lsgd": 0.7}, rounds=3))
    assert weak.read(there, weak.Options(quick=True)) is not None
    assert weak.read(there, weak.Options()) is None, "a quick run is not the full one"
    starts = ("", "srun -n {n}", "mpirun -n {n}")
    assert len({weak.name(weak.Options(launcher=start), 2) for start in starts}) == 3


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("table2",), "There is no command 'table2'; did you mean table1?"),
        (("table1", "--tau", "0"), "--tau must be"),
        (("table1", "--c", "-1"), "--c must be"),
        (("table1", "--algorithm", "oldsdg"), "did you mean oldsgd?"),
        (("costs", "--write", "nowhere.md"), "there is no file nowhere.md"),
        (("convergence", "--seeds", "0", "1"), "--seeds takes one"),
        (("convergence", "--iterations", "0"), "--iterations must be at least 1"),
        (("speedup", "--alpha", "0"), "--alpha must be positive, not "),
        (("speedup", "--target", "nan"), "--target must be positive, not "),
        (("tau", "--also", "nowhere"), "--also nowhere: there is no such folder or file"),
        (("stragglers", "--factor", "0.5"), "--factor must be"),
        (("scale", "--problem", "cubic"), "--problem takes quadratic and logistic"),
        (("weak", "--ranks", "1"), "--ranks must be at least 2"),
        (("topologies", "--topology", "rings"), "rings"),
    ],
)
def test_bad_input_is_one_line(
    args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        study.main(args)
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1, told
