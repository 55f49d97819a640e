"""The doctor: what it concludes from facts that are known, and what it prints under mpirun."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hpc_oldsgd import topology
from hpc_oldsgd.bench import overlap
from hpc_oldsgd.doctor import examine, findings, findings_network, links, machine, network, report
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.launch import launcher

Mpirun = Callable[..., "subprocess.CompletedProcess[str]"]


def rank(host: str = "a", **changes: Any) -> dict[str, Any]:
    made = {
        **copy.deepcopy(FACTS),
        "host": host,
        "place": host,
        "cores": [0, 1, 2, 3],
        "machine_cores": 4,
        "quota": None,
        "threads": 4,
        "load": 0.0,
        "memory_bytes": 10**10,
        "gpu": None,
        "cuda_visible": "",
        "extension": {"native": True, "cuda": True, "compiler": "GNU 12", "isa": "avx2"},
        "library": {"version": "MPICH 5", "standard": "4.1", "threads": "multiple", "file": ""},
        "wall_less_steady_s": 100.0,
        "says_cuda_aware": False,
    }
    return {**made, **changes}


FACTS: dict[str, Any] = json.loads(json.dumps(machine.facts(torch.device("cpu"))))
GPU = {"name": "H100", "uuid": "u0", "visible": 1, "index": 0, "free_bytes": 10**10}


def said(warnings: Any) -> dict[str, str]:
    found = list(warnings)
    assert all(w.fix.endswith(".") and len(w.fix) > 20 for w in found)
    return {w.name: w.text for w in found}


def link(i: int, j: int, rate: float = 1e9, latency: float = 1e-5, intact: bool = True) -> Any:
    return {
        "edge": [i, j], "latency_s": latency, "bytes": 1000, "bytes_per_s": rate,
        "at_once_bytes_per_s": rate / 2, "intact": intact,
    }  # fmt: skip


def test_own_facts() -> None:
    assert FACTS["cores"] and FACTS["memory_bytes"] > 10**7 and FACTS["rss_bytes"] > 10**7
    assert FACTS["gpu"] is None and FACTS["versions"]["torch"]
    loopback = [one for one in FACTS["interfaces"] if one["kind"] == "loopback"]
    assert not loopback or loopback[0]["name"] in network.counters()


def test_nothing_is_wrong() -> None:
    ranks = [rank("a"), rank("b")]
    assert not said(findings.of_machines(ranks))
    assert not said(findings.of_clocks(ranks, [0.0, 0.0]))
    assert not said(findings.of_memory(ranks, 10**6, 2))
    assert not said(findings_network.of_mpi(ranks[0]["library"], 2))


def test_cores() -> None:
    crowd = [rank() for _ in range(5)]
    assert "5 ranks share 4 of 4 cores of a" in said(findings.of_machines(crowd))["oversubscribed"]
    bound = [rank(cores=[0]), rank(cores=[0])]
    assert "2 ranks share 1 of 4 cores" in said(findings.of_machines(bound))["oversubscribed"]
    assert set(said(findings.of_machines([rank(cores=[0]), rank(cores=[1])]))) == set()
    assert "0.5 cores' worth" in said(findings.of_machines([rank(quota=0.5)]))["quota"]
    assert "load average 9.0" in said(findings.of_machines([rank(load=9.0)]))["busy"]


def test_gpus() -> None:
    other = {**GPU, "uuid": "u1"}
    assert not said(findings.of_machines([rank(gpu=GPU), rank(gpu=other), rank("b", gpu=GPU)]))
    shared = said(findings.of_machines([rank(gpu=GPU), rank(gpu=GPU), rank(gpu=other)]))
    assert shared == {"shared-gpu": "ranks 0-1 share one GPU of a"}
    mixed = said(findings.of_machines([rank(gpu=GPU), rank("b"), rank("c")]))
    assert mixed["mixed-devices"].startswith("rank 0 have a GPU, ranks 1-2 have none")
    assert "torch does not see" in said(findings.of_machines([rank(cuda_visible="0")]))["blind"]
    plain = {"native": True, "cuda": False, "compiler": "x", "isa": "avx2"}
    assert "cuda-kernels" in said(findings.of_machines([rank(gpu=GPU, extension=plain)]))
    none = {"native": False, "reason": "no compiler"}
    assert "no compiler" in said(findings.of_machines([rank(extension=none)]))["extension"]


def test_versions_memory_and_clocks() -> None:
    newer = {**FACTS["versions"], "torch": "9.9"}
    text = said(findings.of_machines([rank(), rank("b", versions=newer)]))["versions"]
    assert text.startswith("torch is 9.9 on rank 1")
    need = findings.needed_bytes(10**9, 2)
    assert need == 10 * 10**9
    assert "memory" in said(findings.of_memory([rank(memory_bytes=need - 1)], 10**9, 2))
    assert "memory" not in said(findings.of_memory([rank(memory_bytes=need)], 10**9, 2))
    small = {**GPU, "free_bytes": 10**9}
    assert set(said(findings.of_memory([rank(gpu=small)], 10**9, 2))) == {"gpu-memory"}
    late = rank("b", wall_less_steady_s=95.0)
    assert "of b is 5.0 s behind" in said(findings.of_clocks([rank(), late], [0.0, 0.0]))["clock"]
    assert not said(findings.of_clocks([rank(), late], [0.0, -5.0]))


def test_links() -> None:
    ranks = [rank(host) for host in "abcd"]

    def warned(found: list[Any], ranks: Any = ranks, cards: Any = ()) -> dict[str, str]:
        within = {"within a host": {"cards": {"a": list(cards)}}}
        return said(findings_network.of_links(found, ranks, within))

    good = [link(0, 1), link(1, 2), link(2, 3)]
    assert not warned(good)
    slow = warned([*good, link(0, 3, rate=4e8)])
    assert slow == {"slow-link": "the link 0 - 3 (a, d) moves 400 MB/s, usual are 1.00 GB/s"}
    late = warned([*good, link(0, 3, latency=1e-3)])
    assert "answers after 1000 us, usual are 10 us" in late["slow-link"]
    both = warned([link(0, 1), link(0, 3), link(1, 2, rate=2e8), link(2, 3, rate=2e8)])
    assert both["slow-card"] == "all slow links end at rank 2 (c)"
    assert "corrupt" in warned([link(0, 1, intact=False)])
    # Shared memory and a network are not compared with each other.
    two = [rank("a"), rank("a"), rank("b"), rank("b")]
    assert not warned([link(0, 1, 9e9), link(2, 3, 9e9), link(1, 2), link(0, 3)], two)
    # A slow link within a host counts where a card carries it, not in shared memory.
    one = [rank("a") for _ in range(4)]
    uneven = [*good, link(0, 3, rate=1e8)]
    assert not warned(uneven, one) and "slow-link" in warned(uneven, one, ["lo"])


def test_edges_measured_together_share_neither_rank_nor_card() -> None:
    edges = links.edges_of(topology.from_name("torus:3x4", 12))
    places = [f"host{i // 3}" for i in range(12)]
    groups = links.colours(edges, places)
    assert sorted(edge for group in groups for edge in group) == edges
    for group in groups:
        ranks = [i for edge in group for i in edge]
        assert len(ranks) == len(set(ranks))
        cards = [p for i, j in group if places[i] != places[j] for p in (places[i], places[j])]
        assert len(cards) == len(set(cards))
    assert len(links.colours([(0, 1), (2, 3)], ["h"] * 4)) == 1
    one_peer = links.edges_of(topology.from_name("one-peer-exponential", 4))
    assert one_peer == [(0, 1), (0, 2), (1, 3), (2, 3)] or len(one_peer) > 4


def test_which_card_carried_the_bytes() -> None:
    rises = [{"lo": 50, "eth0": 2100}, {"lo": 60, "eth0": 2050}, {"eth0": 10}]
    cards = network.by_place(["a", "a", "b"], rises, [1000, 1000, 1000])
    assert cards == {"a": ["eth0"], "b": []}
    assert network.by_place(["a"], [{"lo": 5}], [0]) == {}


def test_a_faster_network_that_stands_idle() -> None:
    def card(name: str, kind: str, rate: float | None, up: bool = True) -> dict[str, Any]:
        return {"name": name, "kind": kind, "bits_per_s": rate, "up": up}

    fabric = card("mlx5_0/1", "InfiniBand", 1e11)
    here = [card("lo", "loopback", None), card("eth0", "Ethernet", 1e9), fabric]
    one = rank("a", interfaces=here, locked_bytes=65536)
    seen = {"between hosts": {"cards": {"a": ["eth0"], "b": ["eth0"]}}}
    found = said(findings_network.of_network(seen, [one, one, rank("b", interfaces=here[:2])]))
    assert "mlx5_0/1 (InfiniBand, 100 Gbit/s) stands idle" in found["idle-network"]
    assert set(found) == {"idle-network", "locked-memory"}
    good = {"between hosts": {"cards": {"a": ["mlx5_0/1"]}}}
    assert not said(findings_network.of_network(good, [one]))
    assert not said(findings_network.of_network({}, [one]))


def test_progress_and_mpi() -> None:
    def mode(name: str, round_s: float, hidden: float, cpu_s: float = 0.0) -> dict[str, Any]:
        exposed = round_s * (1 - hidden)
        return {
            "mode": name,
            "round_s": round_s,
            "hidden": hidden,
            "cpu_s": cpu_s,
            "exposed_s": exposed,
        }

    modes = [mode("none", 2.0, 0.0), mode("poll", 1.04, 0.9), mode("thread", 1.0, 1.0)]
    assert examine.progress.best(modes) == "thread"
    assert examine.progress.best([mode("none", 1.0, 1.0), mode("thread", 1.2, 0.5)]) == "none"
    of = findings_network.of_progress
    assert not said(of({"modes": modes}, "thread"))
    assert "hides 50%" in said(of({"modes": [mode("thread", 2.0, 0.5)]}, "thread"))["not-hidden"]
    dear = said(of({"modes": [mode("thread", 1.0, 1.0, cpu_s=0.9)]}, "thread"))
    assert "90% of a core" in dear["costly-progress"]
    serial = {**rank()["library"], "threads": "serialized"}
    assert "--progress poll" in said(findings_network.of_mpi(serial, 2))["threads"]


def test_advice() -> None:
    ring = topology.from_name("ring", 4)
    found: dict[str, Any] = {
        "progress": {"modes": [{"mode": "thread", "round_s": 1.0}], "t_c": 0.1, "bytes": 10**6},
        "machines": [rank()] * 4,
        "messages": {"ring same": {"seconds": 0.1}, "ring int4": {"seconds": 0.013}},
    }

    def asked(model_bytes: int, grad_seconds: float) -> dict[str, Any]:
        options = examine.Options(model_bytes=model_bytes, grad_seconds=grad_seconds)
        return examine.advice(found, ring, options)

    quick = asked(10**7, 2.0)
    assert (quick["tau"], quick["wire"]) == (1, "same")  # 1 s, half a gradient
    slow = asked(10**7, 0.1)
    assert slow["wire"] == "int4" and slow["tau"] == 2  # 0.13 s, 1.56 with the margin
    words = "--topology ring --progress thread --wire int4 --tau 2 --fragments 2"
    assert slow["command"].endswith(words)
    far = said(findings_network.of_advice(asked(10**9, 0.1), 64))
    assert "tau = 64 does not hide it" in far["network-too-slow"]


def test_advice_does_not_rest_on_what_the_doctor_calls_spoilt() -> None:
    """A busy host made nobody's help look best; the same report says that it is busy."""
    modes = [
        {"mode": "none", "round_s": 1.0, "hidden": 0.95, "exposed_s": 0.3, "cpu_s": 0.1},
        {"mode": "thread", "round_s": 1.4, "hidden": 0.5, "exposed_s": 0.7, "cpu_s": 0.9},
    ]
    found: dict[str, Any] = {
        "progress": {"modes": modes, "t_c": 0.1, "bytes": 10**6}, "machines": [rank()] * 2,
        "clock_offsets_s": [0.0, 0.0], "model_bytes": 10**6, "links": [], "network": {},
        "messages": {"ring same": {"seconds": 0.1}},
    }  # fmt: skip
    pair = topology.from_name("ring", 2)

    def names() -> set[str]:
        found["advice"] = examine.advice(found, pair, examine.Options(model_bytes=10**6))
        return {one.name for one in examine.warnings(found, pair)}

    assert names() == set() and found["advice"]["progress"] == "none"
    found["machines"] = [rank(load=30.0)] * 2
    assert names() == {"busy"} and found["advice"]["progress"] == "thread"
    assert found["advice"]["reason"].endswith("ask again when it is quiet")
    found["machines"] = [rank()] * 2
    modes[0]["hidden"] = 0.2  # messages that do not move by themselves need somebody
    assert "not-hidden" in names() and found["advice"]["progress"] == "thread"


@pytest.mark.parametrize(
    ("variable", "command"),
    [("", "mpirun -n 4 python -m hpc_oldsgd.train --tau 5"),
     ("SLURM_JOB_ID", "sbatch --ntasks=4 jobs/train.slurm --tau 5"),
     ("PBS_JOBID", 'qsub -l select=4:ncpus=1:mpiprocs=1 -v HPC_OLDSGD_ARGS="--tau 5" '
      "jobs/pbs/train.pbs"),
     ("LSB_JOBID", 'HPC_OLDSGD_ARGS="--tau 5" bsub -n 4 <jobs/lsf/train.lsf'),
     ("FLUX_JOB_ID", "flux batch -n 4 jobs/flux/train.flux --tau 5")],
)  # fmt: skip
def test_advice_inside_a_job_is_a_job_of_the_same_kind(
    variable: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "7")
    assert launcher.command_of_run(4, "--tau 5") == command


@pytest.mark.parametrize("bad", [{"model_bytes": 3}, {"grad_seconds": 0}, {"grad_seconds": -1.0}])
def test_bad_options(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be"):
        examine.Options(**bad)


def test_names() -> None:
    assert findings.names([3]) == "rank 3"
    assert findings.names([0, 1, 2, 7]) == "ranks 0-2, 7"


def test_on_three_ranks(mpirun: Mpirun) -> None:
    done = mpirun(3, "-m", "hpc_oldsgd.doctor", "--json", "--model-bytes", "400000")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1  # rank 0 alone prints
    found = json.loads(done.stdout)
    assert found["ranks"] == len(found["machines"]) == 3
    assert [one["edge"] for one in found["links"]] == [[0, 1], [0, 2], [1, 2]]
    for one in found["links"]:
        assert one["intact"] and one["bytes_per_s"] > 0 and one["at_once_bytes_per_s"] > 0
        assert 0 < one["latency_s"] < 1
    modes = [mode["mode"] for mode in found["progress"]["modes"]]
    assert modes in (["none", "poll", "thread"], ["none", "poll"])
    assert found["network"]["within a host"]["edges"] == 3
    assert found["advice"]["command"].startswith("mpirun -n 3 python -m hpc_oldsgd.train")
    text = report.text(found)
    assert all(warning["fix"] in text for warning in found["warnings"])
    assert found["advice"]["command"] in text and "thread level" in text


def test_on_one_rank(mpirun: Mpirun) -> None:
    done = mpirun(1, "-m", "hpc_oldsgd.doctor", "--model-bytes", "4000")
    assert done.returncode == 0, done.stderr
    assert "one rank: nothing is sent" in done.stdout and "--tau 1" in done.stdout


@pytest.mark.parametrize(
    ("module", "bad", "told"),
    [(examine, {"topology": "torus:3x3"}, "torus"), (overlap, {"topology": "torus:3x3"}, "torus"),
     (overlap, {"algorithm": ("sgdx",)}, "sgdx"), (overlap, {"slow": ("9:2",)}, "9")],
)  # fmt: skip
def test_one_process_checks_the_options_of_a_measurement(
    module: Any, bad: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 4 ranks, and without MPI."""
    monkeypatch.setattr(module, "start_mpi", lambda *_: pytest.fail("MPI was started"))
    module.main(module.Options(check_agents=4))
    with pytest.raises(UserError, match=told):
        module.main(module.Options(**bad, check_agents=4))
