"""The command line `dpfuse`: flags, their checks, exit codes. What a command does is in the file of its name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dpfuse.engine.plan import size_in_bytes
from dpfuse.errors import DPFuseError
from dpfuse.version import __version__

__all__ = ["main"]

COMM_SIZES, LAST_SIZES = (1.0, 5.0, 25.0, 100.0), (0.1, 1.0)  # MB


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the name of the program; None: those of this process.

    Returns:
        0; 1 where something failed. A command line that is wrong ends the process with 2.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    try:
        return _run(options, arguments)
    except DPFuseError as error:
        if dist.is_initialized():
            raise  # this is a rank, and its launcher names it and the exception
        print(f"dpfuse {options.command}: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    # Each command imports what it needs: a plan is there in no time.
    if options.command == "plan":
        from dpfuse.commands.plan import show_plan

        return show_plan(options.model, options.comm_buffer_size, options.last_comm_buffer_size)
    if options.command == "tune":
        from dpfuse.commands.tune import tune

        caps = options.comm_buffer_size, options.last_comm_buffer_size
        return tune(options.model, options.nproc_per_node, options.steps, caps, options.out, arguments)
    from dpfuse.commands.bench import Effort, bench

    grid = [(comm, last) for comm in options.comm_buffer_sizes for last in options.last_comm_buffer_sizes]
    effort = Effort(options.rounds, options.steps)
    unused = options.find_unused_parameters
    return bench(options.model, options.nproc_per_node, grid, effort, options.out, arguments, find_unused=unused)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpfuse", description="Buckets for your own model: look, tune, measure.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="plan | tune | bench")
    plan = _command(commands, "plan", "show the buckets of a model, beside those of torch's DDP; starts nothing")
    _flag(plan, "comm_buffer_size", _size, 25.0, "MB", "size at which a bucket is sent")
    _flag(plan, "last_comm_buffer_size", _size, 1.0, "MB", "the same for the bucket sent last")
    tune = _command(commands, "tune", "record some backwards, find the best buckets for them, and try these")
    _ranks_and_folder(tune)
    _flag(tune, "steps", _at_least_one, 5, "N", "backwards to record with the old and with the new buckets")
    _flag(tune, "comm_buffer_size", _size, float("inf"), "MB", "limit of a bucket")
    _flag(tune, "last_comm_buffer_size", _size, float("inf"), "MB", "limit of the bucket sent last")
    bench = _command(commands, "bench", "time steps over a grid of bucket sizes, beside torch's DDP")
    _ranks_and_folder(bench)
    _flag(bench, "comm_buffer_sizes", _sizes, COMM_SIZES, "MB,MB", "one axis of the grid")
    _flag(bench, "last_comm_buffer_sizes", _sizes, LAST_SIZES, "MB,MB", "the other axis")
    _flag(bench, "rounds", _at_least_one, 7, "N", "turns of every contender, each in a new random order")
    _flag(bench, "steps", _at_least_one, 10, "N", "timed steps per turn")
    bench.add_argument(
        *_spellings("find_unused_parameters"),
        action="store_true",
        help="some parameters get no gradient; DDP needs to know",
    )
    return parser


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text}.", allow_abbrev=False)
    parser.add_argument(
        "model",
        metavar="module:factory",
        help="a function, importable from here, that returns (module, loss); loss(model) runs it to a scalar",
    )
    return parser


def _ranks_and_folder(parser: argparse.ArgumentParser) -> None:
    text = "ranks to start (default: one per GPU, without GPUs 2); in a job that a launcher started, its ranks are used"
    parser.add_argument(*_spellings("nproc_per_node"), type=_at_least_one, metavar="N", help=text)
    folder = Path(f"{parser.prog.replace(' ', '-')}")
    _flag(parser, "out", Path, folder, "DIR", "folder for the report")


def _flag(
    parser: argparse.ArgumentParser, name: str, kind: Callable[[str], Any], default: Any, metavar: str, text: str
) -> None:
    shown = ",".join(f"{size:g}" for size in default) if isinstance(default, tuple) else default
    text = f"{text} (default: {shown})"
    parser.add_argument(*_spellings(name), type=kind, default=default, metavar=metavar, help=text)


def _spellings(name: str) -> list[str]:
    """With underscores, as Python and torchrun have them, and with hyphens."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _size(text: str) -> float:
    try:
        size = float(text)
        size_in_bytes(size, "a buffer size")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected MB from 0 on, such as 25 or 0.5 (0 sends every gradient alone, inf all together)"
        ) from None
    return size


def _sizes(text: str) -> tuple[float, ...]:
    return tuple(map(_size, text.split(",")))


def _at_least_one(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 1 on")
    return int(text)
