"""Figures from run folders that the real writer made: what is drawn, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_oldsgd import cli
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.plot import curves, labels, style
from hpc_oldsgd.plot.__main__ import PROG, Options, main
from hpc_oldsgd.runs import folder as run_folder
from hpc_oldsgd.runs import reader

pytest.importorskip("matplotlib")


def write_run(path: Path, *, simulated: bool = False, ended: bool = True, **changes: Any) -> Path:
    """A run of ten rows; `changes` go to the section of config.json they belong to."""
    options: dict[str, Any] = {"partition": "iid", "seed": 0, "eval_every": 0, "out": str(path)}
    if simulated:
        options |= {"c": 2.0}
    algorithm = {"name": "oldsgd", "tau": 5}
    for key, value in changes.items():
        (algorithm if key in ("name", "tau", "form") else options)[key] = value
    path.mkdir()
    folder = run_folder.RunFolder(path)
    folder.write(
        "config.json",
        {
            "options": options, "algorithm": algorithm, "task": {"name": "digits", "batch": 8},
            "agents": 4, "alpha": 0.1, "iterations": 50,
            "topology": {"name": "ring", "lambda_2": 1 / 3},
        },
    )  # fmt: skip
    for k in range(1, 11):
        folder.row(
            {
                "round": k, "iteration": 5 * k, "time": 60.0 * k, "train_loss": 2.0 / k,
                "test_accuracy": 0.09 * k, "consensus": 10.0**-k,
            }
        )  # fmt: skip
    if ended:
        folder.write("summary.json", {"time_unit": "units" if simulated else "s"})
    folder.close()
    return path


def plot(*words: object) -> None:
    cli.run(main, Options, prog=PROG, argv=[str(word) for word in words])


def axis_of(runs: list[reader.Run], panel: curves.Panel, x: curves.X, **options: Any) -> Any:
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    scale, _ = curves.x_axis(runs, x)
    curves.draw(axis, panel, runs, x, scale, options.get("smooth", False))
    return axis


# -- what is drawn -----------------------------------------------------------------------------


def test_wall_and_simulated_time_never_share_a_figure(tmp_path, capsys):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", simulated=True)
    plot(a, b, "--out", tmp_path / "out", "--format", "svg")
    said = capsys.readouterr().out
    text = {p.stem: p.read_text() for p in (tmp_path / "out").iterdir()}
    assert set(text) == {"curves-iteration", "curves-wall", "curves-simulated"}
    assert all(str(tmp_path / "out" / f"{stem}.svg") in said for stem in text)
    # matplotlib writes each text into the SVG as a comment
    assert "<!-- MPI -->" in text["curves-iteration"]
    assert "<!-- simulated -->" in text["curves-iteration"]
    assert "wall time (min)" in text["curves-wall"]
    assert "simulated time" not in text["curves-wall"]
    assert "simulated time" in text["curves-simulated"]
    assert "no timeline of" in said


def test_lines_are_the_columns(tmp_path):
    runs = reader.read([write_run(tmp_path / "a")])
    loss, accuracy, consensus = (axis_of(runs, p, "time") for p in curves.choose_panels(runs))
    x, y = loss.lines[0].get_data()
    np.testing.assert_allclose(x, np.arange(1, 11))  # minutes
    np.testing.assert_allclose(y, 2.0 / np.arange(1, 11))
    np.testing.assert_allclose(accuracy.lines[0].get_ydata(), 9.0 * np.arange(1, 11))  # percent
    assert [axis.get_yscale() for axis in (loss, accuracy, consensus)] == ["log", "linear", "log"]


@pytest.mark.parametrize(
    ("last_s", "unit", "divisor"), [(299, "s", 1), (301, "min", 60), (10801, "h", 3600)]
)
def test_the_unit_of_wall_time_follows_its_length(last_s, unit, divisor):
    run = reader.Run(Path("a"), [{"iteration": 1, "time": last_s}], "wall")
    assert curves.x_axis([run], "time") == (divisor, f"wall time ({unit})")


def test_the_long_name_of_a_run_out_of_view_takes_no_room():
    rows = [{"iteration": k, "train_loss": 1.0, "consensus": 1.0} for k in (1, 2)]
    far = [{**row, "consensus": 1e9} for row in rows]
    runs = [reader.Run(Path("a"), some, "wall", label="word " * 30) for some in (*[rows] * 4, far)]
    axis = axis_of(runs, curves.choose_panels(runs)[-1], "iteration")
    (told,) = (text for text in axis.texts if text.get_text())
    assert told.get_text().startswith("\N{UPWARDS ARROW} word") and not told.get_in_layout()
    assert max(map(len, told.get_text().split("\n"))) <= curves.PANEL_LETTERS


def test_perplexity_and_other_tasks_get_their_panel():
    def keys(**row: float) -> list[str]:
        run = reader.Run(Path("a"), [{"iteration": 1, **row}], "wall")
        return [panel.key for panel in curves.choose_panels([run])]

    assert keys(test_perplexity=30.0) == ["train_loss", "test_perplexity", "consensus"]
    assert keys(test_loss=3.0) == ["train_loss", "test_loss", "consensus"]


def test_a_figure_is_the_same_file_twice(tmp_path):
    a = write_run(tmp_path / "a")
    for out in ("x", "y"):
        plot(a, "--out", tmp_path / out, "--x", "iteration")
    for name in ("curves-iteration.png", "curves-iteration.svg"):
        data = (tmp_path / "x" / name).read_bytes()
        assert data == (tmp_path / "y" / name).read_bytes()
        assert len(data) < 200_000


def test_smoothing_keeps_what_is_smooth_and_leaves_gaps():
    assert curves.smoothed([3.0] * 50, log=False) == pytest.approx([3.0] * 50)
    steps = [math.exp(k) for k in range(80)]
    np.testing.assert_allclose(curves.smoothed(steps, log=True)[20:60], steps[20:60], rtol=1e-6)
    gap = curves.smoothed([1.0, math.nan, 1.0], log=False)
    assert math.isnan(gap[1]) and gap[0] == gap[2] == 1.0
    noisy = np.where(np.arange(400) % 2, 1.0, -1.0)
    assert np.abs(curves.smoothed(noisy.tolist(), log=False))[80:-80].max() < 1e-6


def test_smooth_draws_both_lines(tmp_path):
    runs = reader.read([write_run(tmp_path / "a")])
    axis = axis_of(runs, curves.choose_panels(runs)[1], "iteration", smooth=True)
    raw, mean = axis.lines
    assert raw.get_alpha() < 1 and mean.get_alpha() is None
    assert raw.get_color() == mean.get_color()


def test_lines_of_many_runs_all_differ():
    looks = {str(sorted(style.line(k).items(), key=str)) for k in range(28)}
    assert len(looks) == 28


def test_compare_draws_every_algorithm_that_got_anywhere(tmp_path):
    from hpc_oldsgd.study.compare import draw

    row = {"iteration": 5, "time": 5.0, "train_loss": 2.0, "test_accuracy": 0.5, "consensus": 0.0}
    worse = {**row, "train_loss": math.inf, "consensus": math.nan}
    assert draw({"oldsgd": [row, row], "olgt": [worse], "led": []}, "a title", tmp_path / "all")
    text = (tmp_path / "all.svg").read_text()
    assert "oldsgd" in text and "olgt" in text and "<!-- led -->" not in text
    assert (tmp_path / "all.png").stat().st_size > 5000


# -- labels ------------------------------------------------------------------------------------


def labels_of(*paths: Path) -> list[str]:
    runs = reader.read(paths)
    labels.tell_apart(runs)
    return [run.label for run in runs]


def test_labels_say_what_differs_and_the_title_what_does_not(tmp_path):
    a = write_run(tmp_path / "a", tau=5, form="delta", resume="never", keep=2)
    b = write_run(tmp_path / "b", name="ldsgd", tau=10, eval_every=7)
    assert labels_of(a, b) == ["oldsgd, τ = 5", "ldsgd, τ = 10"]
    c = write_run(tmp_path / "c", name="ldsgd", tau=5, resume="auto", keep=1)
    assert labels_of(a, c) == ["oldsgd", "ldsgd"]  # nobody asks how it was saved
    assert labels.title(reader.read([a, b])) == "digits, ring, n = 4, α = 0.1, iid"


def test_small_print_and_folders_tell_twins_apart(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", eval_every=7)
    c = write_run(tmp_path / "c")
    assert labels_of(a, b) == ["eval every = 0", "eval every = 7"]
    assert labels_of(a, c) == ["a", "c"]
    assert labels_of(a, b, c) == ["eval every = 0 (a)", "eval every = 7", "eval every = 0 (c)"]
    assert labels_of(a) == ["a"]
    assert labels_of(a, a) == ["a"]


def test_a_folder_of_all_algorithms_is_a_run_for_each(tmp_path):
    rows = [{"algorithm": name, "iteration": 5, "time": 7.0} for name in ("oldsgd", "kgt")]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert labels_of(tmp_path) == ["oldsgd", "kgt"]
    assert {run.clock for run in reader.read([tmp_path])} == {"simulated"}


# -- folders -----------------------------------------------------------------------------------


def test_a_run_that_is_still_going(tmp_path, capsys):
    a = write_run(tmp_path / "a", simulated=True, ended=False)
    with (a / "metrics.jsonl").open("a") as file:
        file.write('{"round": 11, "itera')  # half a row
    plot(a, "--format", "png", "--x", "time")
    assert "iteration 50/50" in capsys.readouterr().out
    assert (a / "plots" / "curves-simulated.png").is_file()


def test_among_several_folders_those_without_a_run_are_named(tmp_path, capsys):
    """As runs/* has them: of jobs with runs inside, or of a run that failed at its start."""
    a, b = write_run(tmp_path / "a"), tmp_path / "b"
    b.mkdir()
    plot(a, b, "--out", tmp_path / "out", "--format", "svg", "--x", "iteration")
    assert f"{b} holds no run\n" in capsys.readouterr().out
    assert (tmp_path / "out" / "curves-iteration.svg").is_file()
    with pytest.raises(SystemExit):
        plot(a, tmp_path / "c")
    assert "There is no folder" in capsys.readouterr().err


def test_a_resumed_run_counts_what_came_later():
    rows = [{"iteration": k, "v": v} for k, v in [(5, 0), (10, 0), (15, 0), (10, 1), (15, 1)]]
    assert [(r["iteration"], r["v"]) for r in reader.in_order(rows)] == [(5, 0), (10, 1), (15, 1)]


def test_null_is_a_gap():
    run = reader.Run(Path("a"), [{"v": 1}, {"v": None}, {}], "wall")
    assert run.values("v", 2.0)[0] == 2.0 and all(map(math.isnan, run.values("v")[1:]))
    assert run.has("v") and not run.has("w")


def damage(name: str, content: bytes | None) -> Any:
    def act(run: Path) -> None:
        (run / name).unlink() if content is None else (run / name).write_bytes(content)

    return act


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (damage("metrics.jsonl", None), "no metrics.jsonl"),
        (damage("metrics.jsonl", b'{"iteration": 5}\nrubbish\n{"iteration": 9}\n'), "line 2,"),
        (damage("metrics.jsonl", b"[1, 2]\n"), "line 1,"),
        (damage("metrics.jsonl", b"\xff\xfe\n"), "line 1,"),
        (damage("metrics.jsonl", b""), "nothing to draw yet"),
        (damage("config.json", None), "a holds no whole run: there is no config.json.\n"),
        (damage("config.json", b'{"options": '), "damaged"),
        (damage("config.json", b"3"), "damaged"),
        (damage("summary.json", b"{"), "damaged"),
        (damage("trace.json", b'{"traceEvents": [{"ph": "X"}]}'), "damaged"),
        (damage("trace.json", b"{"), "damaged"),
    ],
)
def test_a_damaged_folder_is_one_line_and_exit_2(tmp_path, capsys, act, says):
    a = write_run(tmp_path / "a")
    act(a)
    with pytest.raises(SystemExit) as stop:
        plot(a, "--out", tmp_path / "out", "--format", "svg", "--x", "iteration")
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1 and says in error
    assert not (tmp_path / "out").exists()  # everything is read before anything is drawn


def test_a_trace_of_no_round_leaves_the_curves(tmp_path, capsys):
    """A run that is resumed after its last round has nothing to trace."""
    a = write_run(tmp_path / "a")
    (a / "trace.json").write_text('{"traceEvents": []}')
    plot(a, "--format", "svg", "--x", "iteration")
    assert "no timeline: " in capsys.readouterr().out
    assert [p.name for p in (a / "plots").iterdir()] == ["curves-iteration.svg"]
    with pytest.raises(SystemExit):
        plot(a, "--rounds", "1:2")
    assert "has no spans" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "Name the folder"),
        (("nowhere",), "There is no folder nowhere"),
        ((__file__,), "is not a folder"),
        (("RUN", "--rounds", "3"), "FROM:TO"),
        (("RUN", "--rounds", "5:5"), "FROM:TO"),
        (("RUN", "--ranks", "0"), "need a trace"),
        (("RUN", "--format"), "at least one"),
        (("PARENT",), "there are runs inside it"),
        (("RUN", "--format", "svg", "--out", __file__), "Cannot write"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(tmp_path, capsys, words, says):
    places = {"RUN": write_run(tmp_path / "a"), "PARENT": tmp_path}
    with pytest.raises(SystemExit) as stop:
        plot(*(places.get(word, word) for word in words))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and says in error and error.count("\n") == 1


def test_without_matplotlib_the_line_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with (
        pytest.raises(UserError, match=r'pip install "hpc_oldsgd\[plots\]"'),
        style.figure(tmp_path / "a", ["png"], 2.0),
    ):
        pass


def test_no_training_code_is_imported():
    code = (
        "import sys, hpc_oldsgd.plot.__main__\n"
        "print(*sorted(m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'mpi4py', 'hpc_oldsgd', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        "hpc_oldsgd", "hpc_oldsgd.cli", "hpc_oldsgd.cli.fields", "hpc_oldsgd.errors",
        "hpc_oldsgd.files",
        "hpc_oldsgd.launch", "hpc_oldsgd.launch.frameworks", "hpc_oldsgd.launch.launcher",
        "hpc_oldsgd.launch.openmpi",
        "hpc_oldsgd.plot", "hpc_oldsgd.runs", "hpc_oldsgd.runs.reader",
        *(f"hpc_oldsgd.plot.{m}" for m in
          ("__main__", "curves", "labels", "style", "timeline")),
    }  # fmt: skip


def test_numbers_that_no_float_holds_are_left_out(tmp_path):
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    lines += [json.dumps(row | {"iteration": 10**400}), json.dumps(row | {"iteration": math.nan})]
    last = json.loads(lines[-3]) | {"iteration": 10**6, "time": 10**400, "train_loss": 10**400}
    (run / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(last)]) + "\n")
    (read,) = reader.read([run])
    assert read.rows[-1]["iteration"] == 10**6 and len(read.rows) == len(lines) - 1
    plot(run, "--out", tmp_path / "figures")
