"""The flags of `python -m dpfuse.launch`: torchrun's, Paddle's beside them, and what is wrong with a command line."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from dpfuse.job.devices import check_one_rank_each, select_gpus, visible_gpus
from dpfuse.job.nodes import STARTED_PORT, read_nodes, take_variables
from dpfuse.job.rank_program import SECONDS_TO_END

__all__ = ["PROGRAM", "parse", "say"]

PROGRAM = "dpfuse.launch"
# The dashes into which word processors and web pages turn hyphens.
TYPOGRAPHIC_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"


# What the launcher adds to torchrun's flags: the names of each, the first of which is that in the parsed command line.
FLAGS: dict[tuple[str, ...], dict[str, Any]] = {
    ("gpus", "devices", "selected_gpus"): {
        "help": "physical GPUs for the ranks, one rank for each, such as 0,1. Default: all visible GPUs."
    },
    ("patch",): {
        "action": "store_true",
        "default": False,
        "help": "every DistributedDataParallel of the program is dpfuse's; see dpfuse run.",
    },
    ("requeue_exit",): {
        "type": int,
        "default": 0,
        "help": "exit code where all ranks have stopped together (dpfuse.stop_on_signals), by which a cluster may "
        "start the job again. Default: 0.",
    },
    ("run_mode",): {"help": "collective, the only mode here."},
    ("job_id",): {"help": "a name of the job; torchrun's --rdzv_id."},
    ("log_level",): {"help": "of the launcher's own messages, such as INFO or DEBUG."},
    ("use_paddlecloud",): {
        "action": "store_true",
        "help": "accepted, and ignored: give the machines with --master or --ips.",
    },
    ("master",): {
        "help": "host:port of node 0, to which the machines of a job connect (default port: 29500). Needs --nnodes. "
        "Without --rank the machines get their numbers by themselves."
    },
    ("rank",): {
        "type": int,
        "help": "with --master: the number of this machine, from 0; the master is node 0.",
    },
    ("ips", "cluster_node_ips"): {
        "help": "the IP addresses of all machines, such as 10.0.0.1,10.0.0.2. Give the same command on each machine: "
        "it finds itself in the list, unless --node_ip tells it. The first one is node 0."
    },
    ("node_ip",): {"help": "with --ips: this machine's address in the list."},
    ("started_port", "start_port"): {
        "help": f"with --ips: the port of node 0, to which the machines connect. Default: {STARTED_PORT}.",
    },
}


def _parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "python -m dpfuse.launch"
    parser.usage = "%(prog)s [flags] script.py [arguments of the script]"
    parser.allow_abbrev = False  # the beginning of a flag would mean another one when a flag is added
    parser.description = "Start a program on several ranks, here or on more machines, with torchrun's flags."
    for names, settings in FLAGS.items():
        spellings = [f"--{spelling}" for name in names for spelling in (name, name.replace("_", "-"))]
        parser.add_argument(*dict.fromkeys(spellings), **{"default": None, **settings})
    # torchrun's defaults would hide whether the user asked; its variables still count.
    for name in ("nproc_per_node", "master_port"):
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})
    return parser


def _plain(word: str) -> str:
    """Return `word` as a flag: two hyphens in place of its dashes, and no value."""
    return "--" + word.lstrip("-" + TYPOGRAPHIC_DASHES).partition("=")[0]


def _suggestion(word: str, flags: Sequence[str]) -> str:
    plain, spelled = _plain(word).replace("-", "_"), [flag.replace("-", "_") for flag in flags]
    longer = [flag for flag in spelled if flag.startswith(plain)]  # the user may have cut it short
    close = longer or difflib.get_close_matches(plain, spelled, n=1)
    if not close:
        return f" See `python -m {PROGRAM} --help`."
    return f" Did you mean --{close[0].lstrip('_')}?"


def _refuse_misspelt(word: str, flags: Sequence[str]) -> None:
    """Raise ValueError for a word that looks like a flag but cannot be one."""
    if word.lstrip("-")[:1] in tuple(TYPOGRAPHIC_DASHES):
        raise ValueError(
            f"{word!r} begins with a typographic dash, not with the hyphens of a flag (copied from a page?)."
            f"{_suggestion(word, flags)}"
        )
    if word.startswith("-") and not word.startswith("--") and _plain(word) in flags:
        raise ValueError(f"{word!r} begins with one hyphen, expected two. Write {_plain(word)}.")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line; an error in it ends the program with exit code 2."""
    parser = _parser()
    try:
        args = _read(arguments, parser)
        # Parsed once more without defaults: the values that are set then were written by the user.
        written = argparse.Namespace(**{action.dest: None for action in parser._actions})
        parser.parse_known_args(arguments, written)
        given = {name for name, value in vars(written).items() if value is not None}
        args.nodes = read_nodes(args, given | take_variables(args, given, os.environ))
        _settle_job_flags(args)
        _settle_ranks(args)
        _settle_end(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _read(arguments: list[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; ValueError for a flag that does not exist, or no program to start."""
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    for word in arguments:
        _refuse_misspelt(word, flags)
        if word in ("-m", "--module", "--no-python", "--no_python") or word.endswith(".py"):
            break  # the words from here on are the program and its arguments
    for action in parser._actions:
        if action.dest in ("training_script", "training_script_args"):
            action.required = False  # argparse's own error asks for the script's arguments too, which may be none
    args, unknown = parser.parse_known_args(arguments)
    script = args.training_script or ""
    if not script and not unknown:
        example = "train" if args.module else "train.py"
        raise ValueError(
            "got no script to start, expected its name after the flags. Write "
            f"`python -m {PROGRAM} {' '.join([*arguments, example])}`."
        )
    _refuse_misspelt(script, flags)
    if unknown:
        raise ValueError(f"unknown flag {unknown[0]!r}.{_suggestion(unknown[0], flags)}")
    found = os.path.isfile(os.path.join(script, "__main__.py") if os.path.isdir(script) else script)
    if not (args.module or args.no_python) and not found:
        raise ValueError(f"there is no script {script!r} (to run a module, put -m before its name)")
    return args


def _settle_job_flags(args: argparse.Namespace) -> None:
    if args.run_mode not in (None, "collective"):
        raise ValueError(
            f"--run_mode: got {args.run_mode!r}, expected 'collective': there are no parameter servers here. Leave the "
            "flag out."
        )
    if args.log_level is not None:
        args.log_level = args.log_level.upper()
        if not isinstance(logging.getLevelName(args.log_level), int):
            raise ValueError(f"--log_level: got {args.log_level!r}, expected DEBUG, INFO, WARNING, ERROR or CRITICAL")
    if args.job_id is not None:
        args.rdzv_id = args.job_id
    if args.use_paddlecloud is not None:
        say("--use_paddlecloud is ignored; give the machines with --master or --ips")


def _settle_ranks(args: argparse.Namespace) -> None:
    """Set the number of ranks on this machine (as text, for torchrun), and turn `args.gpus` into a list of cards."""
    from torch.distributed.run import determine_local_world_size

    if args.gpus is not None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            args.gpus = select_gpus(args.gpus, "--gpus")
        for warning in caught:
            say(str(warning.message))
        if args.nproc_per_node is None:
            args.nproc_per_node = str(len(args.gpus))
    if args.nproc_per_node is None:
        gpus = visible_gpus()
        if not gpus:
            say("no GPU is visible: starting one rank on the CPU; use --nproc_per_node N to start more")
        args.nproc_per_node = str(gpus or 1)
    try:
        count = determine_local_world_size(args.nproc_per_node)
    except ValueError as error:
        raise ValueError(
            f"--nproc_per_node: got {args.nproc_per_node!r}, expected a number, gpu, cpu or auto ({error})"
        ) from error
    if count < 1:
        raise ValueError(f"--nproc_per_node: got {args.nproc_per_node!r}, expected at least 1")
    if args.gpus is not None:
        check_one_rank_each(args.gpus, count, "--gpus", "--nproc_per_node")
    args.nproc_per_node = str(count)


def _settle_end(args: argparse.Namespace) -> None:
    """Set `args.seconds_to_end`: how long a rank may take to end after it failed or was asked to end."""
    if not 0 <= args.requeue_exit <= 255:
        raise ValueError(f"--requeue_exit: got {args.requeue_exit}, expected an exit code from 0 to 255")
    seconds: Any = getattr(args, "shutdown_timeout", None)  # a flag of torch 2.12
    source = "--shutdown_timeout"
    if seconds is None:
        source = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        seconds = os.environ.get(source, SECONDS_TO_END)
    try:
        args.seconds_to_end = int(seconds)
    except ValueError:
        args.seconds_to_end = -1
    if args.seconds_to_end < 0:
        raise ValueError(f"{source}: got {seconds!r}, expected whole seconds from 0 on")


def say(text: str) -> None:
    """Print a line of the launcher."""
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)
