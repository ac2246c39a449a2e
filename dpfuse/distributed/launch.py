"""`python -m dpfuse.launch`: torchrun with `--gpus`, loopback on one machine, and errors that name the rank.

Owns the command line. Processes, signals, restarts and logs are torchrun's (`torch.distributed.run`); what
runs inside a rank is in rank.py.
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from dpfuse.distributed import rank as rank_program
from dpfuse.distributed.devices import cores_per_rank, select_gpus
from dpfuse.distributed.failure import RankFailure, first_failure, read_record
from dpfuse.distributed.variables import LOOPBACK_HOSTS, environment, one_machine_variables

__all__ = ["main"]

PROGRAM = "dpfuse.launch"
# What word processors and web pages make of a hyphen or two.
TYPOGRAPHIC_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"


def _parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "python -m dpfuse.launch"
    parser.usage = "%(prog)s [flags] script.py [arguments of the script]"
    parser.description = "Start a program on several ranks, here or on more machines, with torchrun's flags."
    parser.add_argument(
        "--gpus",
        "--devices",
        dest="gpus",
        default=None,
        help="physical GPUs for the ranks, one rank for each, such as 0,1. Default: all visible GPUs.",
    )
    # torchrun's default of 1 would hide whether the user asked; its variable PET_NPROC_PER_NODE still counts.
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=None)
    return parser


def _plain(word: str) -> str:
    """`word` as a flag is written: two hyphens, whatever dashes it begins with, and no value."""
    return "--" + word.lstrip("-" + TYPOGRAPHIC_DASHES).partition("=")[0]


def _suggestion(word: str, flags: Sequence[str]) -> str:
    close = difflib.get_close_matches(_plain(word).replace("-", "_"), [f.replace("-", "_") for f in flags], n=1)
    if not close:
        return f" See `python -m {PROGRAM} --help`."
    return f" Did you mean --{close[0].lstrip('_')}?"


def _misspelt(word: str, flags: Sequence[str]) -> str | None:
    """What is wrong with a word that looks like a flag but cannot be one."""
    if word.lstrip("-")[:1] in tuple(TYPOGRAPHIC_DASHES):
        return (
            f"{word!r} begins with a typographic dash, not with the hyphens of a flag (copied from a page?)."
            f"{_suggestion(word, flags)}"
        )
    if word.startswith("-") and not word.startswith("--") and _plain(word) in flags:
        return f"{word!r} begins with one hyphen, expected two. Write {_plain(word)}."
    return None


def _parse(arguments: list[str]) -> argparse.Namespace:
    """The parsed command line; whatever is wrong with it ends the program with exit code 2."""
    parser = _parser()
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    for word in arguments:
        problem = _misspelt(word, flags)
        if problem:
            parser.error(problem)
        if word in ("-m", "--module", "--no-python", "--no_python") or word.endswith(".py"):
            break  # what follows belongs to the program, or is its name
    args, unknown = parser.parse_known_args(arguments)
    problem = _misspelt(args.training_script, flags)
    if problem:
        parser.error(problem)
    if unknown:
        parser.error(f"unknown flag {unknown[0]!r}.{_suggestion(unknown[0], flags)}")
    if not (args.module or args.no_python) and not os.path.isfile(args.training_script):
        parser.error(f"there is no script {args.training_script!r} (to run a module, put -m before its name)")
    try:
        _settle_ranks(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _settle_ranks(args: argparse.Namespace) -> None:
    """Decide how many ranks start here (a string, for torchrun); `args.gpus` becomes the list of cards."""
    import torch
    from torch.distributed.run import determine_local_world_size

    if args.gpus is not None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            args.gpus = select_gpus(args.gpus, "--gpus")
        for warning in caught:
            _say(str(warning.message))
        if args.nproc_per_node is None:
            args.nproc_per_node = str(len(args.gpus))
    if args.nproc_per_node is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not gpus:
            _say("no GPU is visible: starting one rank on the CPU; use --nproc_per_node N to start more")
        args.nproc_per_node = str(gpus or 1)
    try:
        count = determine_local_world_size(args.nproc_per_node)
    except ValueError as error:
        raise ValueError(
            f"--nproc_per_node: got {args.nproc_per_node!r}, expected a number, gpu, cpu or auto ({error})"
        ) from error
    if count < 1:
        raise ValueError(f"--nproc_per_node: got {args.nproc_per_node!r}, expected at least 1")
    if args.gpus is not None and count != len(args.gpus):
        raise ValueError(
            f"--gpus names {len(args.gpus)} card(s), but --nproc_per_node is {count}; expected the same "
            "number. Leave --nproc_per_node out, or name one card for each rank."
        )
    args.nproc_per_node = str(count)


def _on_one_machine(args: argparse.Namespace) -> bool:
    """Whether nothing on the command line speaks of another machine."""
    if args.standalone:
        return True
    alone = args.nnodes in ("1", "1:1") and int(args.node_rank) == 0
    return alone and args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_addr in LOOPBACK_HOSTS


def _prepare(args: argparse.Namespace, cleanup: ExitStack) -> None:
    """Turn our command line into torchrun's, and set what its ranks inherit."""
    variables: dict[str, str] = {}
    if _on_one_machine(args):
        from dpfuse.distributed import rendezvous

        rendezvous.register()
        args.standalone = False
        args.rdzv_backend = rendezvous.BACKEND
        args.rdzv_endpoint = f"{rendezvous.HOST}:{args.master_port or 0}"
        variables.update(one_machine_variables())
    count = int(args.nproc_per_node)
    if "OMP_NUM_THREADS" not in os.environ and count > 1:
        variables["OMP_NUM_THREADS"] = str(cores_per_rank(count))
    if args.gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(args.gpus)
    cleanup.enter_context(environment(variables))
    if args.log_dir is None and args.redirects == args.tee == "0":
        # torchrun keeps the ranks' error notes there and would leave the folder behind.
        args.log_dir = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="dpfuse-launch-"))
    if not (args.no_python or args.run_path):
        kind = "module" if args.module else "script"
        args.training_script_args = [str(os.getpid()), kind, args.training_script, *args.training_script_args]
        args.training_script = rank_program.__file__
        args.module = False


def _say(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the job that the command line describes and wait for it.

    Args:
        arguments: the command line without the program's name; None takes `sys.argv`.

    Returns:
        The exit code: 0 when every rank ended well; else that of the rank that failed first (128 + n where
        signal n killed it); 128 + n where the launcher itself got signal n; 1 where the job could not be
        started.

    Raises:
        SystemExit: code 2 for a wrong command line, 0 for `--help`.

    Example:
        >>> from dpfuse.launch import main
        >>> try:
        ...     main(["--nproc_per_node", "2", "no_such_script.py"])  # a message on stderr, exit code 2
        ... except SystemExit as end:
        ...     print(end.code)
        2

    Source: PyTorch's torchrun, whose flags all work; `--gpus`/`--devices` are those of Paddle's launcher.
    """
    args = _parse(list(sys.argv[1:] if arguments is None else arguments))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    redirected = args.redirects != "0"
    with ExitStack() as cleanup:
        _prepare(args, cleanup)
        try:
            run(args)
        except ChildFailedError as error:
            return _report(error.failures, redirected)
        except SignalException as error:
            name = signal.Signals(error.sigval).name
            _say(f"got {name}; every rank was ended")
            return 128 + int(error.sigval)
        except (ValueError, AssertionError, RuntimeError, OSError, RendezvousError) as error:
            _say(f"the job could not be started or supervised: {error}")
            return 1
    return 0


def _report(failures: Mapping[int, Any], redirected: bool) -> int:
    told = []
    for number, failure in failures.items():
        ended = RankFailure(number, int(failure.pid), int(failure.exitcode), float(failure.timestamp))
        record = read_record(failure.error_file)
        told.append(record.explains(ended) if record else ended)
    first = first_failure(told)
    # On the console the rank has printed its traceback itself.
    trace = f"\n{first.traceback}" if redirected else ""
    _say(f"{first}; it was the first rank to fail, the others were ended. Exit code {first.shell_code}.{trace}")
    return first.shell_code
