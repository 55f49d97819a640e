"""Errors a user can act on. The command lines print them as one line and exit with their code."""


class UserError(ValueError):
    """Bad input: the message is one sentence that says what is wrong and what to do."""

    exit_code = 2


class Diverged(RuntimeError):
    """The loss became NaN, infinite or exploded: all ranks stopped at the same boundary."""

    exit_code = 3
    local = False  # true where rank 0 is gone and another one speaks for all


class Stopped(RuntimeError):
    """A signal ended the run at a boundary, with a checkpoint: it can be resumed."""

    exit_code = 75  # EX_TEMPFAIL: a job script may requeue
    local = False


class NeighbourTimeout(RuntimeError):
    """A neighbour did not answer within the limit; `everybody` says what each rank was doing."""

    exit_code = 4

    def __init__(self, message: str, everybody: str = "") -> None:
        super().__init__(message)
        self.everybody = everybody
