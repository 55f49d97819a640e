"""Errors a user can act on. The command lines print them as one line and exit with their code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message is one sentence that says what is wrong and what to do."""

    exit_code = 2


class Diverged(RuntimeError):
    """The loss became NaN, infinite or exploded: all ranks stopped at the same boundary."""

    exit_code = 3
    local = False  # true if rank 0 is gone and another rank prints the error


class Stopped(RuntimeError):
    """A signal ended the run at a boundary, with a checkpoint: it can be resumed."""

    exit_code = 75  # EX_TEMPFAIL: a job script may requeue
    local = False


class NotSaved(RuntimeError):
    """The run is complete, but a file of its result could not be written."""

    exit_code = 5
    local = False


class NeighbourTimeout(RuntimeError):
    """A neighbour did not answer within the limit; `everybody` says what each rank was doing."""

    exit_code = 4

    def __init__(self, message: str, everybody: str = "") -> None:
        super().__init__(message)
        self.everybody = everybody


def no_matplotlib() -> UserError:
    return UserError(
        'A plot needs matplotlib, which is not installed: pip install "hpc_oldsgd[plots]".'
    )


def unknown(what: str, name: object, known: Iterable[str], also: str = "") -> UserError:
    """There is no `what` of this name: which one is close, and which are known."""
    known = list(known)
    close = nearest(str(name), known)
    hint = f"did you mean {close}? Known" if close else "known"
    return UserError(f"There is no {what} {name!r}; {hint} are {', '.join(known)}{also}.")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelt most like this one, if any is close."""
    same = {one.lower(): one for one in known}
    return next((same[one] for one in difflib.get_close_matches(name.lower(), same, 1)), None)
