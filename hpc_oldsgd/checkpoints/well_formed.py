"""Whether what a checkpoint's files hold has the form that is read later.

Checksums tell of damage. These tell of files that another program, or another version, has made.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

NUMBER = (int, float)
ENTRY = {"file": str, "bytes": int, "sha256": str}
MANIFEST = {
    "round": int, "iteration": int, "shards": [ENTRY], "layout": dict, "alpha": NUMBER, "bn": str,
    "run": {"agents": int, "kind": str},
}  # fmt: skip
PLACE = {"offset": int, "shape": [int], "stride": [int]}
WINDOW = {
    "loss": [NUMBER], "steps": int, "flights": int,
    **dict.fromkeys(("seconds", "exposed", "transfer", "left_out"), NUMBER),
}  # fmt: skip
STATE = {
    "runner": {"x": Tensor, "t": int, "r": int, "algorithm": dict}, "models": [dict],
    "frozen": dict, "window": WINDOW, **dict.fromkeys(("first_loss", "elapsed", "eval_s"), NUMBER),
}  # fmt: skip
GROUPS = {"state": dict, "param_groups": [{"params": [int], "lr": NUMBER}]}


def fits(value: Any, form: Any) -> bool:
    """`form` is a type, or several; a list whose every entry has the form of its one; or a dict
    whose keys must all be there."""
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(entry, form[0]) for entry in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(fits(value.get(k), f) for k, f in form.items())
    return isinstance(value, form) and not isinstance(value, bool)


def same_form(ours: Any, theirs: Any) -> bool:
    """Equal but for the numbers."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same_form(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same_form, ours, theirs))
    numbers = isinstance(ours, NUMBER) and isinstance(theirs, NUMBER)
    return numbers or (type(ours) is type(theirs) and bool(ours == theirs))


def manifest_fits(manifest: Any) -> bool:
    """Also: the agents are those that the parts are of."""
    if not fits(manifest, MANIFEST) or manifest["round"] < 0 or not manifest["shards"]:
        return False
    places, agents = manifest["layout"].values(), manifest["run"]["agents"]
    if not all(isinstance(place, str) or fits(place, PLACE) for place in places):
        return False
    data, lost = manifest.get("data"), manifest.get("lost", [])
    known = data is None or (
        fits(data, {"of": int, "agents": [int]})
        and len(data["agents"]) == agents
        and all(0 <= i < data["of"] for i in data["agents"])
    )
    tau = manifest.get("tau")
    return (
        known
        and fits(lost, [{"rank": int, "host": str, "round": int}])
        and (tau is None or (fits(tau, int) and tau > 0))
        and len(manifest["shards"]) == (1 if manifest["run"]["kind"] == "simulate" else agents)
    )


def state_fits(state: Any) -> bool:
    """Of one part: what a runner, its optimizers, models and rows take."""
    if not fits(state, STATE):
        return False
    runner, x = state["runner"], state["runner"]["x"]
    optimizers = runner.get("optimizers", [runner.get("optimizer")])
    kinds = (type(None), int, float, Tensor)
    tensors = [*state["frozen"].values(), *(t for one in state["models"] for t in one.values())]
    return (
        fits(optimizers, [GROUPS])
        and all(isinstance(t, Tensor) for t in tensors)
        and all(isinstance(t, Tensor) for t in runner["algorithm"].values())
        and all(t.shape in (x.shape, ()) for t in runner["algorithm"].values())
        and isinstance(state.get("distance", ""), kinds)
        and isinstance(state.get("best"), kinds[:3])
        and fits([state.get("tau", 1), state.get("fragments", 1)], [int])
        and _left_out_fits(runner.get("transport", {}))
        and _streams_fit(runner.get("streams", {}), x)
        and set(state["window"]) == set(WINDOW)
    )


def _left_out_fits(transport: Any) -> bool:
    counts = transport.get("left_out", {}) if isinstance(transport, dict) else None
    return isinstance(counts, dict) and all(
        isinstance(k, str)
        and re.fullmatch(r"\d+:\d+(:\d+)?", k)
        and (fits(v, [int]) or fits(v, [[int]]))
        for k, v in counts.items()
    )


def _streams_fit(streams: Any, x: Tensor) -> bool:
    """Public copies of x's type and agents, each as long as its name says (narrow.py)."""
    return isinstance(streams, dict) and all(
        isinstance(k, str)
        and re.fullmatch(r"(x:)?\d+:\d+:\w+:\d+:\d+", k)
        and isinstance(s, dict)
        and isinstance(s.get("z"), Tensor)
        and isinstance(s.get("holds_x"), bool)
        and s["z"].shape == (*x.shape[:-1], int(k.split(":")[-4]))
        and s["z"].dtype == x.dtype
        for k, s in streams.items()
    )
