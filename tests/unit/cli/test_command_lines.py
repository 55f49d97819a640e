"""One line per mistake, one exit code on all ranks, options that follow the chosen algorithm."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from hpc_oldsgd import cli
from hpc_oldsgd.errors import UserError
from support import ROOT

LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "MV2_", "SLURM_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@dataclass
class Base:
    """Train on a graph."""

    graph: cli.Positional[str]
    """The graph of the agents."""
    algorithm: str = "oldsgd"
    """The algorithm."""
    task: str = "digits"
    out: Path | None = None
    """Folder of the run,
    on a shared disk."""
    fast: bool = False
    kind: Literal["a", "b"] = "a"
    taus: tuple[int, ...] = (1, 3)
    batch_size: int = 8
    _hidden: int = 7

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"--batch-size must be\n  at least 1, not {self.batch_size}.")


@dataclass
class OLDSGD:
    """Overlapping Local Decentralized SGD."""

    tau: int = 5
    """Local steps."""
    state: int = field(init=False, default=0)


@dataclass
class LED(OLDSGD):
    beta: float | None = None
    """Correction, 1/tau without it."""


@dataclass
class Plain:
    pass


@dataclass
class Digits:
    hidden: int = 16


CHOICES = {
    "algorithm": {"oldsgd": OLDSGD, "led": LED, "oled": LED, "plain": Plain},
    "task": {"digits": Digits},
}


def staged(*argv):
    return cli.parse_staged(Base, CHOICES, argv, prog="train")


def test_defaults_and_values():
    base, parts = staged("ring")
    assert base == Base("ring") and parts == {"algorithm": OLDSGD(), "task": Digits()}
    base, parts = staged(
        "ring", "--algorithm=led", "--beta", "0.5", "--tau", "3", "--fast", "--out", "a/b",
        "--taus", "1", "2", "3", "--kind", "b", "--batch_size", "2", "--hidden", "4",
    )  # fmt: skip
    assert base == Base(
        "ring", "led", out=Path("a/b"), fast=True, taus=(1, 2, 3), kind="b", batch_size=2
    )
    assert parts["algorithm"] == LED(tau=3, beta=0.5) and parts["task"] == Digits(4)
    assert base._hidden == 7


def test_the_last_choice_wins_in_both_passes():
    base, parts = staged("ring", "--algorithm", "led", "--algorithm", "oldsgd")
    assert base.algorithm == "oldsgd" and type(parts["algorithm"]) is OLDSGD


def test_an_algorithm_without_options():
    assert staged("ring", "--algorithm", "plain")[1]["algorithm"] == Plain()


@pytest.mark.parametrize(
    "line, message",
    [
        ("", "Missing: GRAPH; see --help."),
        ("ring --tau three", "Cannot read --tau three: the option is --tau INT."),
        ("ring --tau=1.5", "Cannot read --tau 1.5: the option is --tau INT."),
        ("ring --taus 1 x", "Cannot read --taus x: the option is --taus [INT ...]."),
        ("ring --kind c", "Cannot read --kind c: the option is --kind {a,b}."),
        ("ring --tau", "argument --tau: expected one argument; see --help."),
        ("ring --algorithm", "argument --algorithm: expected one argument; see --help."),
        ("ring --fast=1", "argument --fast/--no-fast: ignored explicit argument '1'; see --help."),
        ("ring --batch-size 0", "--batch-size must be\n  at least 1, not 0."),
        ("ring --tua 3", "Unknown option --tua; did you mean --tau?"),
        ("--tua 3", "Unknown option --tua; did you mean --tau?"),
        ("ring --Tau 3", "Unknown option --Tau; did you mean --tau?"),
        ("ring --no-tau", "Unknown option --no-tau; did you mean --tau?"),
        ("ring --xyzzy", "Unknown option --xyzzy; see --help."),
        ("ring --state 1", "Unknown option --state; did you mean --tau?"),
        ("ring -q", "Unknown option -q; see --help."),
        ("ring torus", "Unexpected argument 'torus'."),
        ("ring --beta 1", "--beta belongs to the algorithm led or oled, not to oldsgd."),
        (
            "ring --algorithm ledd",
            "There is no algorithm 'ledd'; did you mean led? Known are oldsgd, led, oled, plain.",
        ),
        ("ring --task mnist", "There is no task 'mnist'; known are digits."),
        ("ring --algorithm=", "There is no algorithm ''; known are oldsgd, led, oled, plain."),
    ],
)
def test_mistakes(line, message):
    with pytest.raises(UserError) as caught:
        staged(*line.split())
    assert str(caught.value) == message


def test_places_and_options_in_any_order():
    for line in ("--fast ring --tau 3", "--tau 3 ring --fast", "ring --fast --tau 3 --"):
        base, parts = staged(*line.split())
        assert base == Base("ring", fast=True) and parts["algorithm"] == OLDSGD(3), line


@pytest.mark.parametrize("word", ["-1", "-.5", "-1e-3", "-inf"])
def test_negative_numbers_are_values(word):
    algorithm = staged("ring", "--algorithm", "led", "--beta", word)[1]["algorithm"]
    assert algorithm == LED(beta=float(word))


def test_none_is_a_value_where_a_field_may_be_none():
    @dataclass
    class Damped:
        beta: float | None = 1.0

    assert cli.parse(Damped, ["--beta", "None"]) == Damped(beta=None)


def test_a_name_in_two_groups_is_a_bug():
    with pytest.raises(argparse.ArgumentError, match="conflicting option string: --hidden"):
        cli.parse_staged(
            Base,
            {"algorithm": {"x": Digits}, "task": {"digits": Digits}},
            ["ring", "--algorithm", "x"],
        )


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        staged("--algorithm", "led", "--help")
    assert not stop.value.code
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for text in (
        "Train on a graph.", "GRAPH The graph of the agents.",
        "Folder of the run, on a shared disk.",
        "algorithm led options", "Local steps. (default: 5)", "Correction, 1/tau without it.",
        "One of oldsgd, led, oled, plain.", "task digits options", "--fast, --no-fast",
    ):  # fmt: skip
        assert text in out
    assert "hidden-" not in out and "--state" not in out


@pytest.mark.parametrize(
    "environment, rank, size",
    [
        ({}, 0, 1),
        ({"PMI_RANK": "3", "PMI_SIZE": "9"}, 3, 9),
        ({"OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 2, 4),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, 1, 2),
        ({"SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}, 5, 8),
        ({"PMIX_RANK": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}, 5, 8),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, 0, 1),  # the batch script itself
        # mpirun inside an srun step: the inner launcher counts
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, 1, 2),
    ],
)
def test_launchers(monkeypatch, environment, rank, size):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (cli.launcher_rank(), cli.launcher_size()) == (rank, size)


SCRIPT = '''
from dataclasses import dataclass
from hpc_oldsgd import cli
from hpc_oldsgd.errors import Diverged, NeighbourTimeout, UserError

@dataclass
class Config:
    """Do a thing."""
    what: str = "nothing"
    """What to do."""

@dataclass
class Other:
    """Do another thing."""
    n: int = 1

class Lost(NeighbourTimeout):
    local = True

def main(config):
    print("ran", config.what, flush=True)
    if config.what == "user": raise UserError("Two\\n  lines.")
    if config.what == "diverge": raise Diverged("The loss exploded.")
    if config.what == "lost" and cli.launcher_rank() == 1: raise Lost("No word from agent 0.")
    if config.what == "interrupt": raise KeyboardInterrupt
    if config.what == "bug": raise ZeroDivisionError("a bug")
    if config.what == "many":
        for i in range(100000): print(i)
    return 7 if config.what == "seven" else None

import sys
if sys.argv[1] == "dispatch":
    from types import SimpleNamespace
    two = lambda config: print(config.n)
    sys.modules["prog.one"] = SimpleNamespace(main=main, Options=Config)
    sys.modules["prog.two"] = SimpleNamespace(main=two, Options=Other)
    cli.dispatch("prog", ("one", "two"), "Two things.", sys.argv[2:])
else:
    cli.run(main, Config, prog="prog")
print("end")
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def call(script, *args, launcher=(), environment=None):
    root = str(ROOT)
    return subprocess.run(
        [*launcher, sys.executable, str(script), *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root, **(environment or {})},
    )


@pytest.mark.parametrize(
    "args, code, out, err",
    [
        (["--what", "user"], 2, "ran user\n", "prog: Two lines.\n"),
        (["--what", "diverge"], 3, "ran diverge\n", "prog: The loss exploded.\n"),
        (["--what", "interrupt"], 130, "ran interrupt\n", ""),
        (["--what", "seven"], 7, "ran seven\n", ""),
        (["--waht", "x"], 2, "", "prog: Unknown option --waht; did you mean --what?\n"),
        (["--what", "nothing"], 0, "ran nothing\nend\n", ""),
        (["dispatch", "two", "--n", "3"], 0, "3\nend\n", ""),
        (["dispatch", "tow"], 2, "",
         "prog: There is no command 'tow'; did you mean two? Known are one, two.\n"),
        (["dispatch"], 2, "", "prog: Say what to do: one, two.\n"),
        (["dispatch", "two", "--n", "x"], 2, "",
         "prog two: Cannot read --n x: the option is --n INT.\n"),
    ],
)  # fmt: skip
def test_commands(script, args, code, out, err):
    done = call(script, *args)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_a_bug_keeps_its_traceback(script):
    done = call(script, "--what", "bug")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_dispatch_help(script):
    done = call(script, "dispatch", "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "one  Do a thing." in done.stdout and "two  Do another thing." in done.stdout


def test_a_closed_pipe_is_quiet(script):
    root = str(ROOT)
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {script} --what many | head -1"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("ran many\n", "")


@pytest.mark.parametrize("rank, printed", [("0", True), ("1", False)])
def test_only_rank_0_speaks(script, rank, printed):
    environment = {"PMI_RANK": rank, "PMI_SIZE": "2"}
    wrong = call(script, "--waht", "x", environment=environment)
    assert wrong.returncode == 2 and bool(wrong.stderr) is printed
    asked = call(script, "--help", environment=environment)
    assert asked.returncode == 0 and bool(asked.stdout) is printed


@pytest.mark.parametrize("command", ["simulate", "topology"])
def test_a_command_of_one_process_always_speaks(command):
    """Started by a rank of some job, or in its shell, it finds that rank's variables."""
    environment = {**os.environ, "PMI_RANK": "1", "PMI_SIZE": "2"}
    for words, code in ((["--waht"], 2), (["--help"], 0)):
        done = subprocess.run(
            [sys.executable, "-m", f"hpc_oldsgd.{command}", *words],
            capture_output=True, text=True, env=environment,
        )  # fmt: skip
        assert done.returncode == code and (done.stderr if code else done.stdout), words


def test_a_local_error_is_printed_where_it_strikes(script):
    done = call(script, "--what", "lost", environment={"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (done.returncode, done.stderr) == (4, "prog: rank 1: No word from agent 0.\n")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun in PATH")
def test_under_mpirun_one_line(script):
    mpirun = shutil.which("mpirun")
    flags = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = call(script, "--waht", "x", launcher=(mpirun, "-n", "2"), environment=flags)
    assert done.returncode == 2
    assert done.stderr.count("prog: ") == 1
