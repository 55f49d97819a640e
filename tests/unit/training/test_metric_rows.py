"""Every column of metrics.jsonl against a computation of its own, and the files around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import folder as run_folder
from hpc_oldsgd.runs.report import summarise
from hpc_oldsgd.tasks import seed_model, seed_step
from support.runs import in_memory, parse

N, TAU, C, ALPHA, T = 4, 3, 5.0, 0.1, 12


def words(more: str = "") -> str:
    return (
        f"--task logistic --agents {N} --tau {TAU} --c {C} --alpha {ALPHA} --iterations {T} "
        f"--eval-every 2 --partition label:0.7 {more}"
    )


def by_hand() -> dict[int, dict[str, Any]]:
    """OLDSGD on the same data with plain tensors: what each row must say, by round."""
    task = parse(words()).task
    W = np.zeros((N, N))
    for i in range(N):
        W[i, [i, i - 1, (i + 1) % N]] = 1 / 3
    seed_model(0)
    start = [p.detach().clone() for p in task.model().parameters()]
    X = [[p.clone() for p in start] for _ in range(N)]
    shards = [task.shard(i, N, "label:0.7", 0) for i in range(N)]
    rows, losses = {}, [[] for _ in range(N)]  # type: ignore[var-annotated]
    for t in range(T):
        if t % TAU == 0:
            Y = [[p.clone() for p in x] for x in X]
        for i in range(N):
            images, labels = shards[i].batch(t)
            seed_step(0, i, t)
            w, b = (p.requires_grad_() for p in X[i])
            loss = F.cross_entropy(images.flatten(1) @ w.T + b, labels)
            grads = torch.autograd.grad(loss, (w, b))
            losses[i].append(loss.item())
            X[i] = [(p - ALPHA * g).detach() for p, g in zip((w, b), grads, strict=True)]
        if (t + 1) % TAU == 0:
            apart = 0.0
            for i in range(N):
                for k in range(2):
                    for j in range(N):
                        difference = Y[j][k] - Y[i][k]
                        X[i][k] = X[i][k] + W[i, j] * difference
                        apart += W[i, j] * float(difference.double().square().sum()) / N
            r = (t + 1) // TAU
            if r % 2 == 0:
                rows[r] = row_by_hand(task, X, losses)
                rows[r]["consensus_op"] = apart
                losses = [[] for _ in range(N)]
    return rows


def row_by_hand(task: Any, X: list[Any], losses: list[list[float]]) -> dict[str, Any]:
    mean = [torch.stack([x[k] for x in X]).mean(0) for k in range(2)]
    numbers: dict[str, Any] = {"agent_loss": [sum(own) / len(own) for own in losses]}
    numbers["batch_loss"] = sum(numbers["agent_loss"]) / N
    numbers["consensus"] = (
        sum(float((x[k] - mean[k]).double().square().sum()) for x in X for k in range(2)) / N
    )
    for split in ("train", "test"):
        images, labels = task.source(split).arrays
        logits = torch.from_numpy(images).flatten(1) @ mean[0].T + mean[1]
        labels = torch.from_numpy(labels)
        numbers[f"{split}_loss"] = float(F.cross_entropy(logits, labels))
        numbers[f"{split}_accuracy"] = float((logits.argmax(1) == labels).double().mean())
    return numbers


def test_rows_are_what_a_literal_run_gives() -> None:
    rows = in_memory(parse(words())).run()
    expected = by_hand()
    assert [row["round"] for row in rows] == [2, 4]
    for row in rows:
        assert row["iteration"] == TAU * row["round"]
        for name, value in expected[row["round"]].items():
            assert row[name] == pytest.approx(value, rel=2e-4, abs=1e-9), name
        # A round takes max(tau, c); each message c, of which tau is hidden.
        assert row["time"] == C * row["round"]
        assert row["transfer"] == pytest.approx(C)
        assert row["exposed"] == pytest.approx(C - TAU)
        assert row["hidden"] == pytest.approx(TAU / C)


def test_throughput_is_samples_over_seconds_without_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that ticks a second per gradient, and ten while the mean model is measured."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def step(_: int) -> None:
        now[0] += 1.0

    simulation = in_memory(parse(words()), on_step=step)
    task, evaluate = simulation.loop.task, type(simulation.loop.task).evaluate

    def slow(*args: Any) -> dict[str, float]:
        now[0] += 5.0
        return evaluate(*args)

    monkeypatch.setattr(type(task), "evaluate", slow)
    rows = simulation.run()
    # The step that ends the first window ticks after its row has started; the last row waits.
    assert [row["step_s"] * TAU * 2 for row in rows] == pytest.approx([TAU * 2 - 1, TAU * 2 + 1])
    last = rows[-1]
    assert last["samples_per_s"] == pytest.approx(N * task.batch / last["step_s"])
    assert last["eval_s"] == 20.0


def test_the_last_row_sees_the_whole_test_set_and_the_same_training_sample() -> None:
    rows = in_memory(parse(words("--eval-samples 40"))).run()
    accuracies = [row["test_accuracy"] * 359 for row in rows]
    assert accuracies[-1] == pytest.approx(round(accuracies[-1]), abs=1e-6)
    assert [row["round"] for row in rows] == [2, 4]
    more = in_memory(parse(words("--eval-samples 40 --iterations 15"))).run()
    assert more[1]["train_loss"] == rows[1]["train_loss"]


def test_local_batchnorm_statistics_are_averaged_for_the_mean_model() -> None:
    simulation = in_memory(
        parse("--batchnorm --buffers local --agents 3 --iterations 4 --tau 2 --eval-every 2")
    )
    simulation.run()
    own = dict(simulation.loop.mean.model.named_buffers())
    for name in ("1.running_mean", "1.running_var"):
        name = next(key for key in own if key.endswith(name.split(".")[1]))
        each = [dict(m.named_buffers())[name] for m in simulation.models]
        assert not torch.equal(each[0], each[1])
        torch.testing.assert_close(own[name], torch.stack(each).mean(0))


def test_a_row_is_one_line_of_strict_json(tmp_path: Path) -> None:
    folder = run_folder.RunFolder(tmp_path)
    whole = {"iteration": 2, "step_s": 0.1, "transfer": 1, "exposed": 0, "hidden": None}
    folder.row({"round": 1, "x": float("nan"), "y": [float("inf"), 1.0], **whole})
    folder.row({"round": 2, **whole})
    folder.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0], parse_constant=pytest.fail)["y"] == [None, 1.0]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"round": 1, "it']))
    assert [row["round"] for row in run_folder.rows_before(tmp_path, 2)] == [1]
    assert run_folder.rows_before(tmp_path / "none", 2) == []


def test_what_is_in_the_folder_decides(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        run_folder.prepare(tmp_path / "file", overwrite=True)
    with pytest.raises(UserError, match="something else"):
        run_folder.prepare(tmp_path, overwrite=True)
    with pytest.raises(UserError, match=r"cannot write to .*Not a directory"):
        run_folder.prepare(tmp_path / "file" / "run", overwrite=False)
    run = tmp_path / "run"
    run_folder.prepare(run, overwrite=False)
    (run / "config.json").touch()
    (run / "notes.txt").touch()
    with pytest.raises(UserError, match="--resume auto"):
        run_folder.prepare(run, overwrite=False)
    run_folder.prepare(run, overwrite=True)
    assert sorted(p.name for p in run.iterdir()) == [".lock", "notes.txt"]
    # As a run that was killed before its first file leaves it, here on NFS.
    begun = tmp_path / "begun"
    (begun / "status").mkdir(parents=True)
    (begun / ".metrics.77").touch()
    (begun / ".nfs0001").touch()
    run_folder.prepare(begun, overwrite=False)


def test_rows_without_what_the_summary_needs_are_none(tmp_path: Path) -> None:
    row = {"round": 1, "iteration": 2, "step_s": 0.1, "transfer": 1, "exposed": 0, "hidden": None}
    bad: list[Any] = [{k: v for k, v in row.items() if k != key} for key in row]
    bad += [{**row, "step_s": "0.1"}, {**row, "transfer": None}, {**row, "iteration": 10**400}]
    lines = map(json.dumps, [*bad, row, {**row, "round": 5}])
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert run_folder.rows_before(tmp_path, 5) == [row]
    task = parse(words()).task
    found = summarise([row | {"test_accuracy": "x"}], task, "a run", "s")
    assert found["step_s"] == 0.1 and found["best"] is None
