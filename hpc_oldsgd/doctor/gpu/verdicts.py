"""What the measurements of all ranks mean: one verdict a check, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..findings import Finding, names
from ..findings_network import rate

State = Literal["ok", "slow", "wrong", "not tried"]
Ranks = Sequence[dict[str, Any]]
"""One entry per rank, as the check's module made it."""
OF_COPY, NARROW = 0.6, 0.25  # of a copy's bandwidth: less is slow. int8 and int4 compute more
HOST_LINK = 2e9  # bytes a second to and from host memory: less is a narrow or broken PCIe link
DIRECT = 0.9  # of the staged speed: a direct path that is slower than this is no gain
RATIO = 1.25  # of a round to the longer of compute and message
REPORT = "Do not train here. Report it: add --json, and paste what it prints into a GPU report."


@dataclass(frozen=True)
class Verdict(Finding):
    state: State = "ok"
    figures: Any = field(default_factory=dict)


def ok(name: str, text: str, figures: Any) -> Verdict:
    return Verdict(name, text, "", "ok", figures)


def failed(name: str, ranks: Ranks) -> Verdict | None:
    """A check that ended with an error on some rank."""
    bad = [i for i, one in enumerate(ranks) if "error" in one]
    if not bad:
        return None
    text = f"ended with an error on {names(bad)}: {ranks[bad[0]]['error']}"
    return Verdict(name, text, REPORT, "wrong", list(ranks))


def not_tried(name: str, why: str, fix: str = "") -> Verdict:
    return Verdict(name, why, fix, "not tried")


def of_device(machines: Ranks) -> Verdict:
    gpus = [one["gpu"] for one in machines]
    if not any(gpus):
        text = "NO GPU WAS TRIED: all of this ran on the CPU (--device cpu)"
        return not_tried("device", text, "Run it without --device cpu on a machine with a GPU.")
    kinds = {f"{gpu['name']} (compute capability {gpu['capability']})" for gpu in gpus if gpu}
    lacking = [i for i, gpu in enumerate(gpus) if not gpu]
    if lacking:
        text = f"{names(lacking)} have no GPU"
        fix = "Ask for one GPU per task: sbatch --gpus-per-task=1."
        return Verdict("device", text, fix, "wrong", gpus)
    return ok("device", f"{names(range(len(gpus)))} on {', '.join(sorted(kinds))}", gpus)


def of_kernel(machines: Ranks) -> Verdict:
    plain = [i for i, one in enumerate(machines) if one["plain_torch_because"]]
    code = machines[0]["extension"]
    if plain:
        why = machines[plain[0]]["plain_torch_because"]
        text = f"plain torch mixes on {names(plain)}, which is right but slow: {why}"
        fix = "Put nvcc in PATH (module load cuda) and build it again: pip install -e . -v"
        return Verdict("kernel", text, fix + " --no-build-isolation.", "slow", code)
    if machines[0]["gpu"]:
        return ok("kernel", f"the extension's, CUDA for {code['cuda_archs']}", code)
    return ok("kernel", f"the extension's for the CPU, {code['isa']}", code)


def of_bits(name: str, what: str, ranks: Ranks) -> Verdict:
    cases = min(one["cases"] for one in ranks)
    most = ranks[0]["of"]
    said = f"{cases} cases" if cases == most else f"{cases} of {most} cases in the time there was"
    bad = [i for i, one in enumerate(ranks) if one["wrong"]]
    if bad:
        first = ranks[bad[0]]["first"][0]
        text = f"{what} gives other bits than the reference on {names(bad)}: {first}"
        return Verdict(name, text, REPORT, "wrong", list(ranks))
    return ok(name, f"{what} gives the reference's bits in {said}", list(ranks))


def of_bandwidth(ranks: Ranks, on_gpu: bool) -> Verdict:
    """The worst op of the slowest rank decides."""

    def least(op: str) -> float:
        return NARROW if op.startswith("int") else OF_COPY

    seen = [
        (r / one["copy_bytes_per_s"] / least(op), op, i)
        for i, one in enumerate(ranks)
        for op, r in one["bytes_per_s"].items()
    ]
    margin, worst, slowest = min(seen)
    one = ranks[slowest]
    share = {op: r / one["copy_bytes_per_s"] for op, r in one["bytes_per_s"].items()}
    peak, copy = one["peak_bytes_per_s"], one["copy_bytes_per_s"]
    best = max(one["bytes_per_s"].values())
    of_peak = (
        f"{best / peak:.0%} of the memory's {rate(peak)}"
        if peak
        else "the memory's peak is unknown"
    )
    figures = ", ".join(f"{op} {share[op]:.2f}" for op in share)
    skipped = f"; no time for {', '.join(one['skipped'])}" if one["skipped"] else ""
    text = f"a copy moves {rate(copy)}; of that: {figures}; {of_peak}{skipped}"
    if margin < 1:
        fix = "Other work on this machine? On the CPU it says nothing about a GPU."
        if on_gpu:
            fix = "Is the GPU shared, or clocked down (nvidia-smi -q -d CLOCK)? If not, report it."
        where = f"{worst} on {names([slowest])} has {share[worst]:.2f} of a copy's speed; "
        return Verdict("bandwidth", where + text, fix, "slow", list(ranks))
    return ok("bandwidth", text, list(ranks))


def of_order(ranks: Ranks) -> Verdict:
    bad = [i for i, one in enumerate(ranks) if any(way["wrong"] for way in one.values())]
    if bad:
        one = ranks[bad[0]]
        mode = next(mode for mode in one if one[mode]["wrong"])
        way = one[mode]
        text = (
            f"{way['wrong']} of {way['rounds']} rounds by --staging {mode} read numbers that were "
            f"not there yet or no longer, on {names(bad)}; the first in round {way['first'][0]}"
        )
        other = [m for m in one if not any(r[m]["wrong"] for r in ranks)]
        fix = f"Only --staging {other[0]} is safe here. Report it." if other else REPORT
        return Verdict("order", text, fix, "wrong", list(ranks))
    done = ", ".join(
        f"{way['rounds']}{'' if way['rounds'] >= way['of'] else ' of ' + str(way['of'])} by {mode}"
        for mode, way in ranks[0].items()
    )
    return ok("order", f"every number was there in time, in all rounds ({done})", list(ranks))


def of_direct(ranks: Ranks, on_gpu: bool) -> Verdict:
    works, says = all(one["works"] for one in ranks), all(one["says"] for one in ranks)
    whose = "device" if on_gpu else "host"
    if works:
        says_no = " (it does not say so of itself)" if on_gpu and not says else ""
        text = f"MPI moves {whose} memory itself, by trial{says_no}"
        fix = "Use --staging direct: auto asks MPI what it says." if says_no else ""
        return Verdict("cuda-aware", text, fix, "ok", list(ranks))
    why = next(filter(None, (one["why_not"] for one in ranks)), "")
    if says:
        text = f"MPI says that it is CUDA-aware, but {why}"
        fix = "Use --staging host, and ask the site about MPI and UCX: ucx_info -d names cuda."
        return Verdict("cuda-aware", text, fix, "wrong", list(ranks))
    text = f"MPI is not CUDA-aware: it does not say so, and {why}"
    fix = "Messages pass through host memory. If that is slow, load the site's CUDA-aware MPI."
    return Verdict("cuda-aware", text, fix, "ok", list(ranks))


def of_messages(ranks: Ranks, to_itself: bool) -> Verdict:
    """All ranks have the same seconds; the copies are each rank's own."""
    nbytes, seconds = ranks[0]["bytes"], ranks[0]["seconds"]
    slowest = max(range(len(ranks)), key=lambda i: ranks[i]["copy_s"])
    link = 2 * nbytes / ranks[slowest]["copy_s"]
    ways = ", ".join(f"{mode} {1e3 * s:.3g} ms ({rate(nbytes / s)})" for mode, s in seconds.items())
    whom = "the rank itself" if to_itself else "each neighbour"
    text = f"{nbytes / 1e6:.3g} MB to {whom}: {ways}; copies to the host and back {rate(link)}"
    if link < HOST_LINK:
        fix = "Look at the PCIe link (nvidia-smi -q -d PCIE) and at the cores the rank is bound to."
        text = f"{names([slowest])} copies slowly to and from host memory. " + text
        return Verdict("messages", text, fix, "slow", list(ranks))
    if len(seconds) == 2 and seconds["host"] < DIRECT * seconds["direct"]:
        fix = "Use --staging host: here the copies are quicker than what MPI does."
        return Verdict("messages", text, fix, "slow", list(ranks))
    if "direct" not in seconds:
        text += "; the direct way was not tried"
    return ok("messages", text, list(ranks))


def of_hidden(ranks: Ranks, mode: str, on_gpu: bool = True) -> Verdict:
    one = ranks[0]
    text = (
        f"a round takes {1e3 * one['round_s']:.3g} ms: {one['ratio']:.2f} times the longer of "
        f"compute ({1e3 * one['compute_s']:.3g}) and message ({1e3 * one['message_s']:.3g}), {mode}"
    )
    if one["ratio"] > RATIO:
        fix = "On the CPU the message and the mix take the gradient's cores: no word about a GPU."
        if on_gpu:
            fix = "Give each rank a core for its progress thread (--cpus-per-task, --bind-to none)."
        return Verdict("overlap", text, fix, "slow", list(ranks))
    return ok("overlap", text, list(ranks))


def of_contexts(ranks: Ranks) -> Verdict:
    """Looked at last: every thread has worked by then."""
    if any(one["opened"] is None for one in ranks):
        return not_tried("contexts", "without a GPU and its driver there are none")
    more = [i for i, one in enumerate(ranks) if set(one["opened"]) - {one["own"]}]
    if more:
        one = ranks[more[0]]
        text = (
            f"{names(more)} opened GPUs beside their own: rank {more[0]} works on {one['own']} "
            f"and holds memory on {', '.join(map(str, sorted(set(one['opened']) - {one['own']})))}"
        )
        fix = "Let each rank see one GPU (--gpus-per-task=1, CUDA_VISIBLE_DEVICES). Report it."
        return Verdict("contexts", text, fix, "wrong", list(ranks))
    return ok("contexts", "each rank holds memory on its own GPU alone", list(ranks))
