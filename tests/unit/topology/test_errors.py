"""What is no topology is refused in one sentence that names the reason; files too."""

import json
import os
import subprocess
import sys

import networkx as nx
import numpy as np
import pytest

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.topology import from_file, from_matrix, from_name, from_networkx
from hpc_oldsgd.topology.__main__ import Options, main

HALF = [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    "name, n, options, reason",
    [
        ("hypercube", 6, {}, "power of two agents and 6 is none; use 4 or 8"),
        ("torus:2x4", 9, {}, "A 2x4 torus has 8 agents, and there are 9"),
        ("torus", 9, {"rows": 2, "cols": 4}, "A 2x4 torus has 8 agents"),
        ("torus", 9, {"rows": 2}, "A 2x4 torus has 8 agents"),
        ("grid", 4, {"rows": 0}, "at least 1, not 0"),
        ("torus:two", 4, {}, "write it like torus:2x4"),
        ("ring:3", 4, {}, "takes nothing after a colon"),
        ("rign", 4, {}, "did you mean ring"),
        ("xyzzy", 4, {}, "known are ring, torus"),
        ("ring", 0, {}, "at least 1 agent"),
        ("ring", 2.5, {}, "whole number"),
        ("ring", 4, {"rows": 2}, "has no option 'rows': it takes no options"),
        ("torus", 4, {"seed": 2}, "takes rows, cols"),
        ("star", 4, {"weights": "uniform"}, "need equal degrees"),
        ("ring", 4, {"weights": "heavy"}, "known are auto, uniform"),
        ("erdos-renyi", 50, {"probability": 0.001}, "200 draws"),
        ("erdos-renyi", 5, {"probability": 1.5}, r"in \(0, 1\]"),
        ("erdos-renyi", 5, {"seed": -1}, "seed"),
    ],
)
def test_names(name, n, options, reason):
    with pytest.raises(UserError, match=reason) as caught:
        from_name(name, n, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "W, reason",
    [
        (np.ones((2, 3)) / 3, "must be square, and it is 2x3"),
        ([1.0, 0.0], "must be square"),
        (np.zeros((0, 0)), "empty"),
        ([[0.5, 0.5], [0.4, 0.6]], r"not symmetric: entry \(0, 1\) is 0.5"),
        ([[0.5, 0.4], [0.4, 0.5]], "not doubly stochastic: row 0 sums to 0.9"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"not be negative, and entry \(0, 1\) is -0.5"),
        ([[np.nan, 0.5], [0.5, 0.5]], "finite"),
        ([[np.inf, 0.5], [0.5, 0.5]], "finite"),
        (np.eye(3), "disconnected: it has 3 parts"),
        ([[0.0, 1.0], [1.0, 0.0]], "never averages"),
        ([["a", "b"], ["c", "d"]], "not an array of real numbers"),
        ([[1j, 0], [0, 1]], "not an array of real numbers"),
        ([[1.0], [0.0, 1.0]], "not an array of real numbers"),
    ],
)
def test_matrices(W, reason):
    with pytest.raises(UserError, match=reason):
        from_matrix(W)


def test_swapping_rounds_never_average():
    """Both rounds are connected pairings over a period, yet they only permute."""
    a, b = np.eye(4)[[1, 0, 3, 2]], np.eye(4)[[2, 3, 0, 1]]
    with pytest.raises(UserError, match="never averages"):
        from_matrix([a, b])
    triangle = (np.ones((3, 3)) - np.eye(3)) / 2  # no diagonal, but odd: it does average
    assert from_matrix(triangle).lambda_2 == pytest.approx(0.5)


@pytest.mark.parametrize(
    "G, reason",
    [
        (nx.DiGraph([(0, 1)]), "directed"),
        (nx.Graph([(0, 1), (2, 3)]), "disconnected"),
        (nx.Graph(), "at least 1 agent"),
    ],
)
def test_networkx(G, reason):
    with pytest.raises(UserError, match=reason):
        from_networkx(G)


@pytest.mark.parametrize(
    "name, text",
    [
        ("edges.txt", "# a ring of three\n0 1\n1 2\n\n2 0  # closes\n"),
        ("edges.csv", "0,1\n1,2\n0,2\n1,0\n"),
        ("of-a-spreadsheet.csv", "\ufeff0,1\n1,2\n0,2\n"),
        ("weighted.txt", f"0 1 {1 / 3!r}\n1 2 {1 / 3!r}\n2 0 {1 / 3!r}\n"),
        ("matrix.csv", "0.333333,0.333333,0.333333\n" * 3),
    ],
)
def test_files(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    t = from_file(path)
    np.testing.assert_allclose(t.W, from_name("ring", 3).W, atol=1e-5)
    assert (t.W == t.W.T).all()
    assert from_name(f"file:{path}", 3).edges() == t.edges()


def test_npy_and_weights_of_files(tmp_path):
    W = from_name("torus", 6).W
    np.save(tmp_path / "W.npy", W)
    assert (from_file(tmp_path / "W.npy").W == W).all()
    (tmp_path / "path.txt").write_text("0 1\n1 2")
    assert from_file(tmp_path / "path.txt", weights="lazy").neighbours(0) == ((1, 1 / 6),)
    (tmp_path / "slow.txt").write_text("0 1 0.1\n1 2 0.2")
    assert from_file(tmp_path / "slow.txt").self_weight(1) == pytest.approx(0.7)
    (tmp_path / "one.txt").write_text("1")
    assert from_file(tmp_path / "one.txt").n == 1


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("a.txt", b"0 one\n", "Line 1 of .* is not numeric: '0 one'"),
        ("a.txt", b"0 1\n1 2 3\n", "Line 2 of .* has 3 numbers where"),
        ("a.txt", b"# nothing\n", "holds no numbers"),
        ("a.txt", b"\xff\xfe\x00\x80", "not a text file"),
        ("a.txt", b"0 1\n2 3\n", "disconnected"),
        ("a.txt", b"0 1\n1 1000000000000\n", "disconnected"),
        ("a.txt", b"0 1\n1 1\n", "loop at agent 1"),
        ("a.txt", b"0 1 0.2\n1 0 0.3\n", "two different weights"),
        ("a.txt", b"0 1 -0.2\n", "positive and finite"),
        ("a.txt", b"0 1 nan\n", "positive and finite"),
        (
            "a.txt",
            b"0 1 0.9\n1 2 0.9\n",
            "not doubly stochastic: the weights of agent 1 sum to 1.8",
        ),
        ("a.csv", b"0.5,0.5,0\n0.5,0.5,0\n", "must be square, and it is 2x3"),
        ("a.npy", b"not an array", "not an intact .npy file"),
        ("a.npy", b"", "not an intact .npy file"),
        ("missing.txt", None, "Cannot read .*: No such file"),
    ],
)
def test_bad_files(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        from_file(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_npy_never_unpickles(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    np.save(tmp_path / "W.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="not an intact"):
        from_file(tmp_path / "W.npy")
    assert not (tmp_path / "sprung").exists()
    np.save(tmp_path / "vector.npy", np.ones(3))
    with pytest.raises(UserError, match="matrix of real numbers"):
        from_file(tmp_path / "vector.npy")


def test_file_of_the_wrong_size(tmp_path):
    (tmp_path / "edges.txt").write_text("0 1\n1 2")
    with pytest.raises(UserError, match="has an agent 2, and there are 2"):
        from_name(f"file:{tmp_path / 'edges.txt'}", 2)
    np.save(tmp_path / "W.npy", HALF)
    with pytest.raises(UserError, match="of 2 agents, and there are 3"):
        from_name(f"file:{tmp_path / 'W.npy'}", 3)


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "hpc_oldsgd.topology", *args], capture_output=True, text=True
    )


def test_command(tmp_path):
    done = command("ring", "9", "--plot", str(tmp_path / "ring.png"))
    assert done.returncode == 0 and done.stderr == ""
    assert "lambda_2            0.8440296287" in done.stdout
    assert "messages per round  18" in done.stdout
    assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")


def test_command_json(capsys):
    main(Options("one-peer-ring", 5, json=True))
    report = json.loads(capsys.readouterr().out)
    assert report["period"] == 3 and report["messages_per_round"] == [4, 4, 4]
    assert report["neighbours"][0][0] == {"1": 0.5}


def test_command_error():
    done = command("hypercube", "6")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("hpc_oldsgd.topology: A hypercube needs")
    assert done.stderr.count("\n") == 1


def test_plot_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="needs matplotlib, which is not installed: pip install"):
        main(Options("ring", 3, plot=tmp_path / "ring.png"))


def test_plot_that_cannot_be_written(tmp_path):
    for name in ("missing/ring.png", "ring.xyz"):
        with pytest.raises(UserError, match="Cannot write"):
            main(Options("one-peer-ring", 5, plot=tmp_path / name))
    with pytest.raises(UserError, match="at most 1024 agents"):
        main(Options("star", 1025, plot=tmp_path / "star.png"))
