"""Jobs under Open MPI's ULFM that lose ranks and go on; what goes on is checked by hand."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_oldsgd import algorithms, tasks, topology
from hpc_oldsgd.checkpoints.store import Checkpoint, find, newest_first
from hpc_oldsgd.runs.recovery import repaired
from hpc_oldsgd.training.options import TrainOptions
from hpc_oldsgd.transport.base import ring_chunks
from support.jobs import TRAIN, Mpirun, openmpi
from support.runs import rows_of

TAU, ALPHA = 2, 0.05
D = 650  # parameters of the logistic task; what follows in x is padding
SHORT = ["--task", "logistic", "--tau", str(TAU), "--alpha", str(ALPHA), "--eval-every", "5"]
SHORT += ["--checkpoint-every", "2", "--keep", "99", "--timeout", "30", "--on-failure", "shrink"]


@pytest.fixture
def ulfm(mpirun: Mpirun) -> Mpirun:
    return openmpi("--with-ft", "ulfm")


def checkpoints(run: Path) -> list[Checkpoint]:
    return [find(p) for p in reversed(newest_first(run)) if (p / "manifest.json").is_file()]


def states(found: Checkpoint) -> list[dict[str, Any]]:
    for k in range(found.count):
        found.check(k)
    return [found.read(k)["runner"] for k in range(found.count)]


def oldsgd_by_hand(found: Checkpoint, t_end: int, P: int = 1) -> torch.Tensor:
    """x_i <- sum_j w_ij x_j^{t-tau} - alpha sum_k g_i^k, from a checkpoint's models, in float64.

    With P = tau each fragment is mixed one step after it left.
    """
    task = tasks.get("logistic")()
    data, n = found.manifest["data"], found.count
    shards = [task.shard(i, data["of"]) for i in data["agents"]]
    W = torch.tensor(topology.from_name(found.manifest["run"]["topology"], n).matrix())
    rows = [s["x"] for s in states(found)]
    X = torch.stack([x[:D] for x in rows]).double()
    parts = [slice(a, min(b, D)) for a, b in ring_chunks(len(rows[0]), P)]
    model = task.model().double()
    for t in range(found.manifest["iteration"], t_end, TAU):
        for k in range(t, t + TAU):
            if (k - t) % (TAU // P) == 0:
                Y = X.clone()
            before = X.mean(0)
            G = torch.zeros_like(X)
            for i in range(n):
                torch.nn.utils.vector_to_parameters(X[i], model.parameters())
                model.zero_grad()
                batch = [b.double() if b.is_floating_point() else b for b in shards[i].batch(k)]
                task.loss(model, tuple(batch)).backward()
                G[i] = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
            X = X - ALPHA * G
            assert torch.allclose(X.mean(0), before - ALPHA * G.mean(0), atol=1e-12)
            if (k + 1 - t) % (TAU // P) == 0:
                part = parts[(k - t) * P // TAU]
                X[:, part] += (W @ Y - Y)[:, part]
    return X


def test_killed_twice_rank_zero_first(ulfm: Mpirun, mpirun: Mpirun, tmp_path: Path) -> None:
    """In two fragments, so that either may be on its way."""
    run, P = tmp_path / "run", 2
    words = [*SHORT, "--fragments", str(P), "--out", str(run)]
    job = ulfm(4, *TRAIN, *words, "--iterations", "160", FAULT="kill:0:21 kill:2:121")
    assert job.returncode == 0, job.stderr
    said = [line for line in job.stderr.splitlines() if " died: " in line]
    assert len(said) == 2 and "rank 0 (" in said[0] and "rank 2 (" in said[1], job.stderr
    assert "3 agents go on" in said[0] and "2 agents go on" in said[1]
    assert all("its data is lost" in line for line in said)

    rows = rows_of(run)
    assert [row["round"] for row in rows] == sorted({row["round"] for row in rows})
    assert rows[-1]["round"] == 80
    agents = [row["agents"] for row in rows]
    assert set(agents) == {4, 3, 2} and agents == sorted(agents, reverse=True)
    assert all(len(row["agent_loss"]) == row["agents"] for row in rows)
    summary = json.loads((run / "summary.json").read_text())
    assert [one["rank"] for one in summary["lost"]] == [0, 2] and summary["agents"] == 2

    saved = checkpoints(run)
    for n, survivors in ((3, [1, 2, 3]), (2, [1, 3])):
        of_n = [found for found in saved if found.count == n]
        assert of_n[0].manifest["data"] == {"of": 4, "agents": survivors}
        last = of_n[-1]
        assert last.r >= of_n[0].r + 2
        X = oldsgd_by_hand(of_n[0], last.manifest["iteration"], P)
        for i, state in enumerate(states(last)):
            assert torch.allclose(state["x"][:D].double(), X[i], atol=1e-5), (n, i)

    # What was written after the deaths is a run of two ranks, on whatever MPI.
    words[words.index("shrink")] = "end"
    more = mpirun(2, "-m", "hpc_oldsgd.train", *words, "--iterations", "164", "--resume", "auto")
    assert more.returncode == 0 and "goes on from round 80" in more.stderr, more.stderr
    final = checkpoints(run)[-1]
    assert final.r == 82 and final.manifest["data"] == {"of": 4, "agents": [1, 3]}
    X = oldsgd_by_hand(saved[-1], 164, P)
    for i, state in enumerate(states(final)):
        assert torch.allclose(state["x"][:D].double(), X[i], atol=1e-5)
    summary = json.loads((run / "summary.json").read_text())
    assert [one["rank"] for one in summary["lost"]] == [0, 2]


def test_differences_begin_anew(ulfm: Mpirun, tmp_path: Path) -> None:
    """With new public copies the survivors follow the full wire as closely as 8 bits do."""
    words = [*SHORT, "--iterations", "60", "--wire", "int8", "--out", str(tmp_path / "run")]
    job = ulfm(3, *TRAIN, *words, FAULT="kill:1:21")
    assert job.returncode == 0 and "2 agents go on" in job.stderr, job.stderr
    first, *_, last = [found for found in checkpoints(tmp_path / "run") if found.count == 2]
    X = oldsgd_by_hand(first, last.manifest["iteration"])
    assert last.r == 30 > first.r + 5
    for i, state in enumerate(states(last)):
        assert torch.allclose(state["x"][:D].double(), X[i], atol=1e-3)
        assert [s["z"].shape for s in state["streams"].values()] == [state["x"].shape]


def test_whoever_is_rank_0_now_says_how_it_ended(ulfm: Mpirun, tmp_path: Path) -> None:
    words = [*SHORT, "--iterations", "400", "--out", str(tmp_path / "run")]
    job = ulfm(3, *TRAIN, *words, FAULT="kill:0:21 term:2:121")
    assert job.returncode == 75, job.stderr
    assert len(re.findall(r"rank 1: stopped by a signal after iteration \d+", job.stderr)) == 1


def test_a_run_that_survived_deaths_is_still_one_jobs(ulfm: Mpirun, tmp_path: Path) -> None:
    """Rank 3 dies, then rank 0, the writer; after each death another job asks for the folder."""
    run = tmp_path / "run"
    words = [*SHORT, "--timeout", "120", "--iterations", "200", "--out", str(run)]
    faults = "kill:3:21 second-job:1:61 kill:0:101 second-job:2:141"
    job = ulfm(4, *TRAIN, *words, FAULT=faults, timeout_s=250)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count(" died: ") == 2, job.stderr
    said = run.with_suffix(".second").read_text()
    assert said.count("2 hpc_oldsgd.simulate: another job writes to") == 2, said
    assert checkpoints(run)[-1].r == 100 and (run / "summary.json").exists()


@pytest.mark.parametrize(
    "name",
    [
        name if name == "overlap_local_sgd" else pytest.param(name, marks=pytest.mark.long)
        for name in algorithms.names()
    ],
)
def test_the_checkpoint_of_the_repair_resumes_to_the_bit(
    ulfm: Mpirun, mpirun: Mpirun, tmp_path: Path, name: str
) -> None:
    run, branch = tmp_path / "run", tmp_path / "branch"
    words = [*SHORT, "--algorithm", name, *(["--tau", "1"] if name.startswith("dsgd") else [])]
    job = ulfm(3, *TRAIN, *words, "--iterations", "80", "--out", run, FAULT="kill:1:21")
    assert job.returncode == 0, job.stderr
    words[words.index("shrink")] = "end"
    repair = next(found for found in checkpoints(run) if found.count == 2)
    words += ["--iterations", "80", "--resume", str(repair.folder), "--out", str(branch)]
    job = mpirun(2, "-m", "hpc_oldsgd.train", *words)
    assert job.returncode == 0, job.stderr
    for a, b in zip(*(states(checkpoints(each)[-1]) for each in (run, branch)), strict=True):
        assert a["t"] == b["t"] == 80 and torch.equal(a["x"], b["x"])


@pytest.mark.parametrize(
    ("words", "fault", "dead"),
    [
        (["--task", "logistic", "--on-failure", "end"], "kill:2:21", 2),
        (["--task", "dies", "--on-failure", "shrink"], "", 1),
    ],
)
def test_a_death_that_ends_the_job_is_named(
    ulfm: Mpirun, tmp_path: Path, words: list[str], fault: str, dead: int
) -> None:
    """In a round without shrink, and before the first round."""
    words = [*SHORT, "--iterations", "400", *words, "--out", str(tmp_path / "run")]
    job = ulfm(3, *TRAIN, *words, FAULT=fault)
    assert job.returncode != 0
    assert re.search(rf"rank \d ends the job: rank {dead} has died", job.stderr), job.stderr
    assert "Traceback" not in job.stderr and " failed, the job" not in job.stderr, job.stderr


def test_an_exception_on_a_torus_over_tcp(ulfm: Mpirun, tmp_path: Path) -> None:
    words = ["--algorithm", "kgt", "--task", "digits", *SHORT[2:], "--topology", "torus:2x2"]
    words += ["--redistribute", "--iterations", "40", "--out", str(tmp_path / "run")]
    job = ulfm(4, *TRAIN, *words, FAULT="raise:3:15", OMPI_MCA_btl="self,tcp")
    assert job.returncode == 0, job.stderr
    assert "rank 3 failed, the others go on" in job.stderr
    assert job.stderr.count("Traceback") == 1 and "ZeroDivisionError" in job.stderr
    assert "3 agents go on" in job.stderr and "dealt anew to the others" in job.stderr
    last = checkpoints(tmp_path / "run")[-1]
    assert last.count == 3 and last.manifest["data"] == {"of": 3, "agents": [0, 1, 2]}
    assert last.manifest["run"]["topology"] == "torus"
    total = sum(state["algorithm"]["c"].double() for state in states(last))
    assert float(total.abs().max()) < 1e-5  # K-GT's corrections cancel among the survivors


@pytest.mark.parametrize(
    ("what", "code"), [("freeze-at-end", 4), pytest.param("kill-at-end", 0, marks=pytest.mark.long)]
)
def test_a_rank_is_lost_after_the_last_round(
    ulfm: Mpirun, tmp_path: Path, what: str, code: int
) -> None:
    """Nothing is left to repair: a dead one is not waited for, a stopped one ends the job."""
    words = [*SHORT, "--iterations", "20", "--timeout", "3", "--out", str(tmp_path / "run")]
    job = ulfm(2, *TRAIN, *words, FAULT=f"{what}:1:0")
    assert job.returncode == code, job.stderr
    late = "rank 0 has waited .* s for rank 1 to start or end"
    assert bool(re.search(late, job.stderr)) == (code == 4)
    assert checkpoints(tmp_path / "run")[-1].r == 10


@pytest.mark.long
@pytest.mark.parametrize("btl", ["self,sm", "self,tcp"])
@pytest.mark.parametrize(
    ("name", "n", "dead"),
    [
        *(("ring", 5, (i,)) for i in range(5)),
        *(("torus:2x3", 6, (i,)) for i in range(6)),
        ("ring", 5, (0, 1)),
        ("ring", 5, (4, 0)),
        ("torus:2x3", 6, (0, 5)),
        ("torus:2x3", 6, (3, 2)),
    ],
)
def test_any_death(
    ulfm: Mpirun, tmp_path: Path, name: str, n: int, dead: tuple[int, ...], btl: str
) -> None:
    """The killed rank anywhere, once and twice, over shared memory and TCP: make test-deaths."""
    run = tmp_path / "run"
    fault = " ".join(f"kill:{i}:{t}" for i, t in zip(dead, (21, 121), strict=False))
    words = [*SHORT, "--topology", name, "--iterations", "160", "--out", str(run)]
    job = ulfm(n, *TRAIN, *words, FAULT=fault, OMPI_MCA_btl=btl)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count(" died: ") == len(dead), job.stderr
    survivors = [i for i in range(n) if i not in dead]
    saved = [found for found in checkpoints(run) if found.count == len(survivors)]
    assert saved[0].manifest["data"] == {"of": n, "agents": survivors}
    assert saved[-1].r == 80 and saved[0].r < 80
    X = oldsgd_by_hand(saved[0], saved[-1].manifest["iteration"])
    for i, state in enumerate(states(saved[-1])):
        assert torch.allclose(state["x"][:D].double(), X[i], atol=1e-5), i


@pytest.mark.parametrize("name", ["ring", "torus", "torus:2x3", "hypercube", "star", "complete"])
def test_the_repaired_graph_mixes(name: str) -> None:
    for n in range(1, 9):
        asked, graph = repaired(dataclasses.replace(TrainOptions(), topology=name), n)
        W = graph.matrix()
        assert graph.n == n and asked.partition(":")[0] in (name.partition(":")[0], "ring")
        assert np.allclose(W.sum(0), 1) and np.allclose(W.sum(1), 1) and (W >= 0).all()
        assert graph.p > 0
