"""Tables from run folders that the real writer made: targets, speed-ups, what is left out."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import folder as run_folder
from hpc_oldsgd.study.collect import Options, main
from support.runs import simulated


def write_run(
    path: Path, accuracy: list[float], seconds: float, n: int = 2, name: str = "oldsgd",
    tau: int = 5, ended: bool = True, alpha: float = 0.1, P: int = 1, measuring: float = 0.0,
    **options: Any,
) -> None:  # fmt: skip
    """One row every `seconds`, of which `measuring` are spent on the row itself."""
    path.mkdir(parents=True)
    folder = run_folder.RunFolder(path)
    folder.write(
        "config.json",
        {
            "options": {"partition": "iid", **options},
            "algorithm": {"name": name, "tau": tau, "fragments": P},
            "task": {"name": "digits"}, "agents": n, "alpha": alpha, "iterations": 50,
            "topology": {"name": "ring", "lambda_2": 0.0},
        },
    )  # fmt: skip
    for k, value in enumerate(accuracy, 1):
        folder.row({"round": k, "iteration": 5 * k, "time": k * seconds, "train_loss": 1 - value,
                    "test_accuracy": value, "consensus": 0.1, "step_s": (seconds - measuring) / 5,
                    "samples_per_s": 40 * n / (seconds - measuring), "transfer": 1.0,
                    "exposed": 0.5, "hidden": 0.5})  # fmt: skip
    if ended:
        folder.write("summary.json", {"time_unit": "units" if "c" in options else "s"})
    folder.close()


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_speedup_over_agents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "n2", [0.5, 0.7, 0.9, 0.95], 8.0)
    write_run(tmp_path / "n4", [0.5, 0.9, 0.95, 0.96], 6.0, n=4)
    write_run(tmp_path / "n32", [0.1, 0.2], 1.0, n=32, ended=False)
    main(Options(tmp_path, target=0.9))
    rows = table(tmp_path / "scaling.csv")
    assert [row["agents"] for row in rows] == ["2", "4", "32"]
    assert [row["time_to_target"] for row in rows] == ["24.0", "12.0", ""]
    assert [row["speedup"] for row in rows] == ["1.0", "2.0", ""]
    states = {row["run"]: row["state"] for row in table(tmp_path / "runs.csv")}
    assert states == {"n2": "done", "n4": "done", "n32": "unfinished"}
    text = (tmp_path / "report.md").read_text()
    assert "![time-digits-iid-wall](time-digits-iid-wall.png)" in text
    assert (tmp_path / "time-digits-iid-wall.png").exists()
    assert not (tmp_path / "algorithms.csv").exists()
    assert "| n32 | 32 |" in capsys.readouterr().out


def test_weak_and_strong_scaling_without_measuring(tmp_path: Path) -> None:
    """5 s and 4 s of training a row; what is measured meanwhile takes longer than either."""
    write_run(tmp_path / "n1", [0.5, 0.7, 0.8, 0.9], 9.0, n=1, measuring=4.0)
    write_run(tmp_path / "n4", [0.8, 0.9], 12.0, n=4, measuring=8.0)
    main(Options(tmp_path, target=0.9))
    one, four = table(tmp_path / "scaling.csv")
    assert (one["time_to_target"], four["time_to_target"]) == ("36.0", "24.0")
    assert (one["training_to_target"], four["training_to_target"]) == ("20.0", "8.0")
    assert (four["speedup"], four["strong_efficiency"]) == ("2.5", "0.625")
    assert (one["samples_per_s"], four["samples_per_s"]) == ("8.0", "40.0")
    assert float(four["weak_efficiency"]) == pytest.approx(1.25)
    text = (tmp_path / "report.md").read_text()
    assert "against 1 agent," in text and "62.5%" in text and "Weak scaling" in text
    assert "A dash" not in text
    assert "![scaling-digits-iid-wall](scaling-digits-iid-wall.png)" in text
    assert (tmp_path / "scaling-digits-iid-wall.png").stat().st_size > 10_000


def test_simulated_runs_scale_by_their_own_clock(tmp_path: Path) -> None:
    write_run(tmp_path / "n1", [0.5, 0.9], 10.0, n=1, c=1.0)
    write_run(tmp_path / "n2", [0.5, 0.8], 12.5, n=2, c=1.0)
    main(Options(tmp_path, target=0.9, figures=False))
    one, two = table(tmp_path / "scaling.csv")
    assert (two["weak_efficiency"], two["speedup"], two["samples_per_s"]) == ("0.8", "", "")
    assert one["training_to_target"] == ""
    text = (tmp_path / "report.md").read_text()
    assert "A dash: the run did not reach the target." in text
    assert "samples per second" not in text and "training_to_target" not in text


def test_speedup_where_the_step_size_grows_with_the_agents(tmp_path: Path) -> None:
    write_run(tmp_path / "n1", [0.5, 0.9], 12.0, n=1, alpha=0.01)
    write_run(tmp_path / "n2", [0.5, 0.9], 6.0, n=2, alpha=0.02)
    main(Options(tmp_path, target=0.9, figures=False))
    rows = table(tmp_path / "scaling.csv")
    assert [(row["agents"], row["alpha"], row["speedup"]) for row in rows] == [
        ("1", "0.01", "1.0"), ("2", "0.02", "2.0"),
    ]  # fmt: skip
    write_run(tmp_path / "n2-again", [0.5, 0.9], 8.0, n=2, alpha=0.01)  # a step size of its own
    main(Options(tmp_path, target=0.9, figures=False))
    rows = table(tmp_path / "scaling.csv")
    fixed, linear = [("0.01", "1.0"), ("0.01", "1.5")], [("0.01", "1.0"), ("0.02", "2.0")]
    assert [(row["alpha"], row["speedup"]) for row in rows] == fixed + linear


def test_best_tau_of_each_algorithm(tmp_path: Path) -> None:
    """The target is 95% of the best accuracy, 0.76 here."""
    for c in (1.0, 5.0):
        top = tmp_path / f"c{c}"
        write_run(top / "a", [0.7, 0.76, 0.8], 10.0, tau=5, c=c)  # at 20
        write_run(top / "b", [0.7, 0.76, 0.8], 7.5, tau=10, P=int(c), c=c)  # at 15
        write_run(top / "c", [0.75, 0.76, 0.8], 15.0 * c, name="ldsgd", tau=3, c=c)  # at 30 c
        write_run(top / "d", [0.2, 0.1], 1.0, name="lugt", tau=3, c=c, ended=False)
        write_run(top / "e", [0.99, 0.1], 1.0, name="ldsgd", tau=5, c=c, ended=False)
        for name in "de":  # they set no target, and are the best of nothing
            (top / name / "diverged").touch()
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "metrics.jsonl").touch()
    (tmp_path / "early" / "diverged").touch()
    main(Options(tmp_path, figures=False))
    assert "early diverged before its first row" in (tmp_path / "report.md").read_text()
    rows = {(row["algorithm"], row["c"]): row for row in table(tmp_path / "algorithms.csv")}
    ours = [rows["oldsgd", c] for c in ("1.0", "5.0")]
    assert [(row["tau"], row["fragments"]) for row in ours] == [("10", ""), ("10", "5")]
    assert [rows[name, "1.0"]["speedup_of_oldsgd"] for name in ("oldsgd", "ldsgd", "lugt")] == [
        "1.0", "2.0", ""
    ]  # fmt: skip
    assert rows["ldsgd", "5.0"]["speedup_of_oldsgd"] == "10.0"
    assert not (tmp_path / "scaling.csv").exists()
    assert {r["state"] for r in table(tmp_path / "runs.csv")} == {"done", "diverged"}
    assert not list(tmp_path.glob("*.png"))


def test_overlap(tmp_path: Path) -> None:
    result = {"algorithm": "oldsgd", "tau": 5, "round_s": 1.0, "ratio_to_ideal": 1.01,
              "transfer_s": 0.2, "exposed_s": 0.002, "hidden": 0.99}  # fmt: skip
    settings = {"ranks": 4, "hosts": 2, "model_bytes": 4_000_000, "mpi": "MPICH"}
    line = json.dumps({"results": [result], "settings": settings})
    (tmp_path / "overlap.txt").write_text(f"a table\n\n{line}\n")
    main(Options(tmp_path))
    row = table(tmp_path / "overlap.csv")[0]
    assert (row["ranks"], row["MB"], row["hidden"]) == ("4", "4.0", "0.99")
    assert "99.0%" in (tmp_path / "report.md").read_text()
    (tmp_path / "overlap.txt").write_text("killed\n")
    with pytest.raises(UserError, match="does not end with the line"):
        main(Options(tmp_path))
    for name in ("whole", "torn"):  # what is damaged is named, and costs no other its place
        write_run(tmp_path / name, [0.5, 0.7], 8.0)
    (tmp_path / "torn" / "config.json").write_text("")
    main(Options(tmp_path, figures=False))
    assert [row["run"] for row in table(tmp_path / "runs.csv")] == ["whole"]
    text = (tmp_path / "report.md").read_text()
    assert text.count("Left out: ") == 2 and f"{tmp_path}/torn/config.json is not JSON" in text


def test_nothing_to_collect(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no folder"):
        main(Options(tmp_path / "none"))
    with pytest.raises(UserError, match="There is no run"):
        main(Options(tmp_path))


def test_a_number_in_a_table_is_the_runs_own(tmp_path: Path) -> None:
    """Of the whole run, as its summary says, and not of its last row."""
    run = simulated("--task logistic --iterations 24 --tau 2 --agents 3 --eval-every 2 --jitter 0.3"
                    " --c 3", tmp_path / "run")  # fmt: skip
    main(Options(tmp_path, figures=False))
    summary = json.loads((run / "summary.json").read_text())
    (row,) = table(tmp_path / "runs.csv")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for key in ("step_s", "samples_per_s", "hidden"):
        assert float(row[key]) == summary[key], key
    assert summary["hidden"] != last["hidden"]  # real times may be equal: the median is a row's
    text = (tmp_path / "report.md").read_text()
    assert f"{summary['hidden']:.1%}" in text and f"{summary['step_s']:.4g}" in text
    (run / "summary.json").unlink()  # a run that is still going is summed up in the same way
    main(Options(tmp_path, figures=False))
    assert float(table(tmp_path / "runs.csv")[0]["hidden"]) == summary["hidden"]
