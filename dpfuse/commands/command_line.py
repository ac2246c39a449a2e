"""The command line `dpfuse`: flags, their checks, exit codes. The commands are in `*_command.py`. Imports no torch."""

from __future__ import annotations

import argparse
import difflib
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpfuse.engine.plan import size_in_bytes
from dpfuse.errors import DPFuseError
from dpfuse.version import __version__

__all__ = ["main"]

# How other launchers call the number of ranks.
RANK_FLAGS = ("nproc_per_node", "nproc", "num_processes", "world_size", "gpus", "n", "np")


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the name of the program; None takes those of this process.

    Returns:
        0, or 1 if the command failed, or 130 after Ctrl-C. A wrong command line ends the process with exit code 2.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.exit(2, f"dpfuse {options.command}: {_unknown(parser, options.command, unknown[0])}\n")
    try:
        return _run(options, arguments)
    except (DPFuseError, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        print(f"dpfuse {options.command}: {'interrupted' if interrupted else error}", file=sys.stderr)
        return 128 + signal.SIGINT if interrupted else 1


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    # Each command imports only what it needs: `dpfuse run` and `dpfuse diff` need no torch.
    if options.command == "plan":
        from dpfuse.commands.plan_command import show_plan

        return show_plan(options.model, options.comm_buffer_size, options.last_comm_buffer_size)
    if options.command == "env":
        from dpfuse.commands.env_command import show_environment

        return show_environment(as_json=options.json)
    if options.command == "doctor":
        from dpfuse.commands.doctor.doctor_command import DoctorRequest, doctor

        program, ranks, own_ranks = _program(options), options.ranks, options.own_ranks
        return doctor(DoctorRequest(program, ranks, own_ranks, options.steps, options.patience, options.out), arguments)
    if options.command == "diff":
        from dpfuse.commands.diff_command import diff

        return diff(options.one, options.other, as_json=options.json)
    from dpfuse.commands.run_command import run

    return run(_program(options), options.ranks, {} if options.finite is None else {"check_finite": options.finite})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpfuse",
        description="Train your program with dpfuse in place of torch's DDP, examine it, and see its buckets.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="run | doctor | diff | plan | env")
    text = "run a program as it is, with dpfuse in place of torch's DDP"
    run = commands.add_parser("run", help=text, description=f"{text}.", allow_abbrev=False)
    text = "ranks to start on this machine (default: none, this process is a rank, or the program starts them)"
    run.add_argument("--ranks", type=_at_least_one, metavar="N", help=text)
    text = "look for NaN and infinite values in gradients: warn on that rank, or raise on all (default: do not look)"
    run.add_argument(*_spellings("check_finite"), dest="finite", choices=("warn", "raise"), help=text)
    _program_of_the_user(run)
    text = "run a program under torch's DDP and under dpfuse in turns: same numbers, how fast, what is wrong"
    doctor = commands.add_parser("doctor", help=text, description=f"{text}.", allow_abbrev=False)
    text = "ranks to start on this machine (default: one per GPU, without GPUs 2)"
    doctor.add_argument("--ranks", type=_at_least_one, metavar="N", help=text)
    _flag(doctor, "steps", _at_least_one, 50, "N", "optimizer steps, after which each run is ended")
    _flag(doctor, "patience", _seconds, 600.0, "SECONDS", "without a step, after which a run is ended")
    _flag(doctor, "out", Path, Path("dpfuse-doctor"), "DIR", "folder for the report")
    text = "the program starts its ranks itself, as with torch.multiprocessing.spawn"
    doctor.add_argument(*_spellings("own_ranks"), action="store_true", help=text)
    _program_of_the_user(doctor)
    text = "find where two runs part, which DPFUSE_TRACE has traced"
    diff = commands.add_parser("diff", help=text, description=f"{text}.", allow_abbrev=False)
    for name in ("one", "other"):
        diff.add_argument(name, type=Path, metavar="FOLDER", help="a folder that DPFUSE_TRACE has named")
    diff.add_argument("--json", action="store_true", help="as JSON")
    text = "show the buckets of a model, beside those of torch's DDP; starts nothing"
    plan = commands.add_parser("plan", help=text, description=f"{text}.", allow_abbrev=False)
    text = "a function, importable from here, that returns the module"
    plan.add_argument("model", metavar="module:factory", help=text)
    _flag(plan, "comm_buffer_size", _size, 25.0, "MB", "size at which a bucket is sent")
    _flag(plan, "last_comm_buffer_size", _size, 1.0, "MB", "the same for the bucket sent last")
    text = "print machine and versions, for the report of a bug; starts nothing"
    env = commands.add_parser("env", help=text, description=f"{text}.", allow_abbrev=False)
    env.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _unknown(parser: Any, command: str, argument: str) -> str:
    """Return what is wrong with an argument that a command does not know, and what to write, in one line."""
    flag = argument.partition("=")[0]
    text = f"unrecognized arguments: {argument}"
    flags = parser._actions[-1].choices[command]._option_string_actions
    if command in ("run", "doctor") and flag.lstrip("-").replace("-", "_") in RANK_FLAGS:
        return f"{text}; expected --ranks, as in: dpfuse {command} --ranks 2 train.py"
    close = difflib.get_close_matches(flag, flags, n=1)
    return f"{text}; did you mean {close[0]}?" if close else f"{text}; see: dpfuse {command} --help"


def _program_of_the_user(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("-m", "--module", action="store_true", help="the program is a module, as in `python -m`")
    kinds.add_argument(
        *_spellings("no_python"), action="store_true", help="the program is a command, such as `accelerate`"
    )
    parser.add_argument("program", metavar="train.py", help="a script, with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program")


def _program(options: argparse.Namespace) -> Any:
    from dpfuse.commands.run_command import Program

    kind = "module" if options.module else "command" if options.no_python else "script"
    return Program(options.program, tuple(options.arguments), kind)


def _flag(
    parser: argparse.ArgumentParser, name: str, kind: Callable[[str], Any], default: Any, metavar: str, text: str
) -> None:
    text = f"{text} (default: {default})"
    parser.add_argument(*_spellings(name), type=kind, default=default, metavar=metavar, help=text)


def _spellings(name: str) -> list[str]:
    """Return a flag with underscores, as in Python and torchrun, and with hyphens."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _size(text: str) -> float:
    try:
        size = float(text)
        size_in_bytes(size, "a buffer size")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected MB from 0 on, such as 25 or 0.5 (0 sends each gradient alone, inf all together)"
        ) from None
    return size


def _at_least_one(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not 0 < time < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds above 0, such as 600")
    return time
