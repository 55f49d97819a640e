"""Command lines: dataclasses in, one-line errors out. A thin layer over tyro.

Help texts are the docstrings under the fields. Whatever a user can get wrong becomes a UserError,
which `guard` prints as `prog: message` before it exits with the error's code. Under a launcher all
ranks read the same command line, so only rank 0 prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import tyro

from hpc_oldsgd.cli.fields import dashed, flags, options, shadow, summary
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.launch.launcher import launcher_rank, launcher_size

T = TypeVar("T")


@contextlib.contextmanager
def guard(prog: str) -> Iterator[None]:
    """Turn errors a user can act on into one line on stderr and an exit code.

    Those are the errors with an `exit_code`. Rank 0 speaks for all; an error with a true `local`
    attribute concerns one rank and is printed by that rank, with its number.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as raised:
        error = _for_the_user(raised)
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        rank, local = launcher_rank(), getattr(error, "local", False)
        if rank == 0 or local:
            where = f"rank {rank}: " if local and launcher_size() > 1 else ""
            message = " ".join(str(error).split()) or type(error).__name__
            print(f"{prog}: {where}{message}", file=sys.stderr, flush=True)
        sys.exit(code)


def _for_the_user(error: Exception) -> Exception:
    """What the machine lacks, rather than this program, in one sentence."""
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
    commands: Mapping[str, tuple[Callable[[Any], int | None], type]],
    *,
    prog: str,
    description: str = "",
    argv: Sequence[str] | None = None,
) -> None:
    """A command line of several commands, `prog NAME ...`, each a (main, config) as for `run`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with guard(prog):
        if not arguments:
            raise UserError(f"Say what to do: {', '.join(commands)}.")
        if arguments[0] in ("-h", "--help"):
            width = max(map(len, commands))
            lines = [f"  {name:{width}}  {summary(c)}" for name, (_, c) in commands.items()]
            if launcher_rank() == 0:
                usage = f"usage: {prog} COMMAND [--help] [OPTIONS]\n"
                print(usage, description, "", *lines, sep="\n")
            return
        _check_choice("command", arguments[0], commands)
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
    defaults: Mapping[str, Any] | None = None,
) -> tuple[T, dict[str, Any]]:
    """Parse `base` together with the dataclasses its own fields choose.

    With choices = {"algorithm": {"oldsgd": OLDSGD, ...}}, `--algorithm oldsgd` (a field of base)
    adds the fields of OLDSGD as plain options. Returns base's instance and
    {"algorithm": OLDSGD(...)}. `defaults` replaces the defaults of fields by name.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    defaults = defaults or {}
    chosen: dict[str, str] = {}
    asks_help = not {"-h", "--help"}.isdisjoint(arguments)
    for key, known in choices.items():
        default = next(field.default for field in options(base) if field.name == key)
        words = values_of(arguments, key)
        name = words[0] if words else defaults.get(key, default)
        if name is not dataclasses.MISSING:
            _check_choice(key, name, known)
            chosen[key] = name
        elif not asks_help:
            raise UserError(f"--{dashed(key)} is missing; known are {', '.join(known)}.")

    types: dict[str, type] = {"base": base}
    types |= {key: choices[key][name] for key, name in chosen.items()}
    owner: dict[str, str] = {}
    for key, config in types.items():
        for field in options(config):
            if owner.setdefault(field.name, key) != key:
                raise TypeError(f"{field.name} is in both {owner[field.name]} and {key}")

    notes = {key: f"One of {', '.join(known)}." for key, known in choices.items()}
    groups: list[Any] = [("base", Annotated[shadow(base, defaults, notes), tyro.conf.arg(name="")])]
    for key, name in chosen.items():
        title = tyro.conf.arg(name=f"{dashed(key)} {name}")
        made = shadow(types[key], defaults, {})
        groups.append((key, Annotated[made, title, tyro.conf.OmitArgPrefixes]))
    parsed = _tyro(
        dataclasses.make_dataclass("Options", groups),
        arguments,
        prog=prog,
        description=description if description is not None else summary(base),
        unknown=lambda token: _unknown(token, types, choices, chosen),
    )
    instances = {key: config(**vars(getattr(parsed, key))) for key, config in types.items()}
    return instances.pop("base"), instances


def _tyro(
    config: type,
    argv: list[str],
    *,
    prog: Any,
    description: Any,
    unknown: Callable[[str], str | None],
) -> Any:
    """tyro.cli, with what it would print in a box raised as a UserError of one sentence."""
    box, help_text = io.StringIO(), io.StringIO() if launcher_rank() else sys.stdout
    try:
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(help_text):
            parsed: Any
            parsed, rest = tyro.cli(
                config, args=argv, prog=prog, description=description, return_unknown_args=True
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        # A misspelt option explains a missing one.
        rest = [word for word in argv if word.startswith("--") and unknown(word)]
        if not rest:
            raise UserError(_sentence(box.getvalue(), argv)) from None
    if rest:
        raise UserError(unknown(rest[0]) or f"Unexpected argument {rest[0]!r}.")
    return parsed


def _sentence(box: str, argv: list[str]) -> str:
    """What a tyro error box says up to its first rule, as one sentence."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ") for line in box.splitlines()[1:]]
    rules = [k for k, line in enumerate(lines) if line and not line.strip("─╰╯ ")]
    said = [line for line in lines[: rules[0] if rules else None] if line]
    text = " ".join(said)
    if match := re.match(r"Error parsing (--[\w-]+)", text):
        option = match[1]
        takes = next((line for line in lines if line.startswith(option + " ")), option)
        if values := values_of(argv, option[2:]):
            return f"Cannot read {option} {' '.join(values)}: the option is {takes}."
    text = re.sub(r"^Error parsing ", "Cannot read ", text)
    if text.startswith("Missing from "):
        missing = [line.split()[0] for line in said if re.match(r"(--[\w-]+|[A-Z_]+)( |$)", line)]
        return f"Missing: {', '.join(missing)}; see --help."
    return text[:1].upper() + text[1:] or "The command line cannot be read; see --help."


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
    near = [flag for flag in known if flag.lower() == option.lower()]
    near = near or difflib.get_close_matches(option, sorted(known), n=1)
    return f"Unknown option {option}; " + (f"did you mean {near[0]}?" if near else "see --help.")


def values_of(argv: Sequence[str], name: str) -> list[str]:
    """The words of the last `--name VALUE ...` or `--name=VALUE`."""
    found: list[str] = []
    for at, word in enumerate(argv):
        option, equals, value = word.partition("=")
        if dashed(option) == f"--{dashed(name)}":
            following = itertools.takewhile(lambda w: not w.startswith("--"), argv[at + 1 :])
            found = [value] if equals else list(following)
    return found


def _check_choice(key: str, name: str, options: Mapping[str, Any]) -> None:
    if name not in options:
        near = difflib.get_close_matches(str(name), options, n=1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        raise UserError(f"There is no {key} {name!r}; {hint} are {', '.join(options)}.")
