"""Command lines: dataclasses in, one-line errors out. A thin layer over argparse.

Help texts are the docstrings under the fields. Whatever a user can get wrong becomes a UserError,
which `guard` prints as `prog: message` before it exits with the error's code. Under a launcher all
ranks read the same command line, so only rank 0 prints.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import UserError, nearest, unknown
from ..launch.launcher import launcher_rank, launcher_size
from . import fields
from .fields import NOT_GIVEN, Positional, dashed, default_of, flags, options, summary, written

__all__ = [
    "Positional", "dispatch", "flags", "guard", "parse", "parse_staged", "run", "values_of",
    "without",
]  # fmt: skip

T = TypeVar("T")
ONE_PROCESS = {
    f"hpc_oldsgd.{name}"
    for name in ("simulate", "export", "plot", "topology", "theory", "data", "study", "jobs")
}  # they start no MPI: a rank in the environment is another program's
NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|-(inf|nan)$", re.IGNORECASE)


@contextlib.contextmanager
def guard(prog: str) -> Iterator[None]:
    """Turn errors a user can act on into one line on stderr and an exit code.

    Those are the errors with an `exit_code`. Only rank 0 prints them. An error with a true `local`
    attribute concerns one rank: that rank prints it, with its number.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has ended, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as raised:
        error = _for_the_user(raised)
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        rank, local = launcher_rank(), getattr(error, "local", False)
        if local or _speaks(prog):
            where = f"rank {rank}: " if local and launcher_size() > 1 else ""
            message = " ".join(str(error).split()) or type(error).__name__
            print(f"{prog}: {where}{message}", file=sys.stderr, flush=True)
        sys.exit(code)


def _speaks(prog: str) -> bool:
    """Not one rank of many that run the same command."""
    return launcher_rank() == 0 or prog.split(" ")[0] in ONE_PROCESS


def _for_the_user(error: Exception) -> Exception:
    """An error of the machine, not of this program, as one sentence."""
    if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
        return UserError("mpi4py is not installed: pip install mpi4py")
    if isinstance(error, (ImportError, RuntimeError)) and "MPI library" in str(error):
        return UserError(
            "mpi4py finds no MPI library: load your site's MPI module, pip install mpich, or set "
            "MPI4PY_LIBMPI to the path of libmpi.so"
        )
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return UserError(f"{os.fsdecode(error.filename)}: {error.strerror}")
    return error


def run(
    main: Callable[[T], int | None],
    config: type[T],
    *,
    prog: str,
    description: str | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Parse the command line into `config`, call main with it, exit with the code it returns."""
    with guard(prog):
        code = main(parse(config, argv, prog=prog, description=description))
    if code:
        sys.exit(code)


def dispatch(
    package: str, names: Sequence[str], description: str, argv: Sequence[str] | None = None
) -> None:
    """`python -m PACKAGE NAME ...`: each name is a module of the package with Options and main.

    The other modules are imported only where their names or help lines are needed.
    """
    arguments, prog = list(sys.argv[1:] if argv is None else argv), package
    asked = [name for name in arguments[:1] if name in names]
    modules = {name: importlib.import_module(f"{package}.{name}") for name in asked or names}
    commands = {name: (module.main, module.Options) for name, module in modules.items()}
    with guard(prog):
        if not arguments:
            raise UserError(f"Say what to do: {', '.join(commands)}.")
        if arguments[0] in ("-h", "--help"):
            width = max(map(len, commands))
            lines = [f"  {name:{width}}  {summary(c)}" for name, (_, c) in commands.items()]
            if _speaks(prog):
                usage = f"usage: {prog} COMMAND [--help] [OPTIONS]\n"
                print(usage, description, "", *lines, sep="\n")
            return
        if arguments[0] not in commands:
            raise unknown("command", arguments[0], commands)
    main, config = commands[arguments[0]]
    run(main, config, prog=f"{prog} {arguments[0]}", argv=arguments[1:])


def parse(
    config: type[T],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    description: str | None = None,
) -> T:
    """The command line as an instance of the dataclass `config`; UserError when it does not fit."""
    return parse_staged(config, {}, argv, prog=prog, description=description)[0]


def parse_staged(
    base: type[T],
    choices: Mapping[str, Mapping[str, type]],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    description: str | None = None,
) -> tuple[T, dict[str, Any]]:
    """Parse `base` together with the dataclasses its own fields choose.

    With choices = {"algorithm": {"oldsgd": OLDSGD, ...}}, `--algorithm oldsgd` (a field of base)
    adds the fields of OLDSGD as plain options. Returns base's instance and
    {"algorithm": OLDSGD(...)}.
    """
    arguments = [_dashed_option(word) for word in (sys.argv[1:] if argv is None else argv)]
    asks_help = not {"-h", "--help"}.isdisjoint(arguments)
    chosen: dict[str, str] = {}
    for key, known in choices.items():
        default: Any = next(field.default for field in options(base) if field.name == key)
        name = (values_of(arguments, key) or [default])[0]
        if name in known:
            chosen[key] = name
        elif name is not dataclasses.MISSING:
            raise unknown(key, name, known)
        elif not asks_help:
            raise UserError(f"--{dashed(key)} is missing; known are {', '.join(known)}.")
    types = {"base": base, **{key: choices[key][name] for key, name in chosen.items()}}

    places = [word for word in written(base).values() if not word.startswith("--")]
    parser = argparse.ArgumentParser(
        prog, " ".join(["%(prog)s [-h] [OPTIONS]", *places]), description or summary(base),
        allow_abbrev=False, exit_on_error=False,
    )  # fmt: skip
    parser._negative_number_matcher = NEGATIVE  # argparse's own takes -1e-3 for an option
    notes = {key: f"One of {', '.join(known)}." for key, known in choices.items()}
    fields.add_options(parser.add_argument, base, notes)
    for key, name in chosen.items():
        group = parser.add_argument_group(f"{dashed(key)} {name} options")
        fields.add_options(group.add_argument, types[key], {})
    if asks_help:
        if _speaks(prog or ""):
            parser.print_help()
        raise SystemExit(0)
    given = _parse(parser, arguments, lambda word: _unknown(word, types, choices, chosen))
    made = _make(types, given)
    return made.pop("base"), made


def _dashed_option(word: str) -> str:
    """--batch_size is --batch-size."""
    option, equals, value = word.partition("=")
    return dashed(option) + equals + value if option.startswith("--") else word


def _parse(
    parser: argparse.ArgumentParser, argv: list[str], complaint: Callable[[str], str | None]
) -> dict[str, Any]:
    """What the user gave, by field name. `complaint` is about an option that is not known."""
    try:
        # Intermixed: otherwise a place that may be empty gets nothing after an option.
        parsed, rest = parser.parse_known_intermixed_args(argv)
    except argparse.ArgumentError as error:
        said = error.message if error.message.startswith("Cannot") else f"{error}; see --help."
        # A misspelt option may be the reason.
        misspelt = filter(None, (complaint(word) for word in argv if word.startswith("--")))
        raise UserError(next(misspelt, said)) from None
    rest = [word for word in rest if word != "--"]  # only says that no option follows
    if rest:
        raise UserError(complaint(rest[0]) or f"Unexpected argument {rest[0]!r}.")
    given = {k: v for k, v in vars(parsed).items() if v is not NOT_GIVEN}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}


def _make(types: Mapping[str, type], values: Mapping[str, Any]) -> dict[str, Any]:
    """An instance of each type from its own values. UserError if one is missing."""
    own: dict[str, dict[str, Any]] = {}
    missing = []
    for key, config in types.items():
        names = written(config)
        own[key] = {name: values[name] for name in names if name in values}
        left = [f for f in options(config) if default_of(f) is dataclasses.MISSING]
        missing += [names[f.name] for f in left if f.name not in own[key]]
    if missing:
        raise UserError(f"Missing: {', '.join(missing)}; see --help.")
    return {key: config(**own[key]) for key, config in types.items()}


def _unknown(
    token: str,
    types: Mapping[str, type],
    choices: Mapping[str, Mapping[str, type]],
    chosen: Mapping[str, str],
) -> str | None:
    """The complaint about an option that none of the types has; None when one has it."""
    option = token.partition("=")[0].replace("_", "-")
    known = {"-h", "--help"}.union(*(flags(config) for config in types.values()))
    if not token.startswith("-") or option in known:
        return None
    for key, configs in choices.items():
        owners = [name for name, config in configs.items() if option in flags(config)]
        if owners:
            return f"{option} belongs to the {key} {' or '.join(owners)}, not to {chosen.get(key)}."
    close = nearest(option, known)
    return f"Unknown option {option}; " + (f"did you mean {close}?" if close else "see --help.")


def without(argv: Sequence[str], options: set[str]) -> list[str]:
    """The words without these options and their values."""
    words: list[str] = []
    dropped = False
    for word in argv:
        if word.startswith("--"):
            dropped = dashed(word.partition("=")[0]) in options
        if not dropped:
            words.append(word)
    return words


def values_of(argv: Sequence[str], name: str) -> list[str]:
    """The words of the last `--name VALUE ...` or `--name=VALUE`."""
    found: list[str] = []
    for at, word in enumerate(argv):
        option, equals, value = word.partition("=")
        if dashed(option) == f"--{dashed(name)}":
            following = itertools.takewhile(lambda w: not w.startswith("--"), argv[at + 1 :])
            found = [value] if equals else list(following)
    return found
