"""`python -m dpfuse.launch`: torchrun with Paddle's flags, loopback on one machine, and errors that name the rank.

Owns the command line. Processes, signals, restarts and logs are torchrun's (`torch.distributed.run`); what
runs inside a rank is in rank_program.py. nodes.py reads Paddle's flags that describe other machines.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from dpfuse.job import rank_program
from dpfuse.job.devices import cores_per_rank, select_gpus
from dpfuse.job.failure import RankFailure, first_failure, read_record
from dpfuse.job.interfaces import interface_of, public_address
from dpfuse.job.nodes import MASTER_PORT, Nodes, add_flags, read_nodes
from dpfuse.job.variables import LOOPBACK_HOSTS, environment, one_machine_variables

__all__ = ["main"]

PROGRAM = "dpfuse.launch"
SHUTDOWN_SECONDS = 8  # that ranks get to end before they are killed; torchrun gives 30
# The dashes into which word processors and web pages turn hyphens.
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
        "--selected_gpus",
        "--selected-gpus",
        dest="gpus",
        default=None,
        help="physical GPUs for the ranks, one rank for each, such as 0,1. Default: all visible GPUs.",
    )
    add_flags(parser)
    # torchrun's defaults would hide whether the user asked; its variables still count.
    for name in ("nproc_per_node", "master_port"):
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})
    return parser


def _plain(word: str) -> str:
    """Return `word` as a flag: two hyphens in place of its dashes, and no value."""
    return "--" + word.lstrip("-" + TYPOGRAPHIC_DASHES).partition("=")[0]


def _suggestion(word: str, flags: Sequence[str]) -> str:
    close = difflib.get_close_matches(_plain(word).replace("-", "_"), [f.replace("-", "_") for f in flags], n=1)
    if not close:
        return f" See `python -m {PROGRAM} --help`."
    return f" Did you mean --{close[0].lstrip('_')}?"


def _misspelt(word: str, flags: Sequence[str]) -> str | None:
    """Return what is wrong with a word that looks like a flag but cannot be one; None if nothing is."""
    if word.lstrip("-")[:1] in tuple(TYPOGRAPHIC_DASHES):
        return (
            f"{word!r} begins with a typographic dash, not with the hyphens of a flag (copied from a page?)."
            f"{_suggestion(word, flags)}"
        )
    if word.startswith("-") and not word.startswith("--") and _plain(word) in flags:
        return f"{word!r} begins with one hyphen, expected two. Write {_plain(word)}."
    return None


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line; an error in it ends the program with exit code 2."""
    parser = _parser()
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    for word in arguments:
        problem = _misspelt(word, flags)
        if problem:
            parser.error(problem)
        if word in ("-m", "--module", "--no-python", "--no_python") or word.endswith(".py"):
            break  # the words from here on are the program and its arguments
    args, unknown = parser.parse_known_args(arguments)
    problem = _misspelt(args.training_script, flags)
    if problem:
        parser.error(problem)
    if unknown:
        parser.error(f"unknown flag {unknown[0]!r}.{_suggestion(unknown[0], flags)}")
    if not (args.module or args.no_python) and not os.path.isfile(args.training_script):
        parser.error(f"there is no script {args.training_script!r} (to run a module, put -m before its name)")
    # Parsed once more without defaults: the values that are set then were written by the user.
    written = argparse.Namespace(**{action.dest: None for action in parser._actions})
    parser.parse_known_args(arguments, written)
    try:
        args.nodes = read_nodes(args, {name for name, value in vars(written).items() if value is not None})
        _settle_ranks(args)
        _settle_end(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _settle_ranks(args: argparse.Namespace) -> None:
    """Set the number of ranks on this machine (as text, for torchrun), and turn `args.gpus` into a list of cards."""
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


def _settle_end(args: argparse.Namespace) -> None:
    """Set `args.seconds_to_end`: how long a rank may take to end after it failed or was asked to end."""
    seconds: Any = getattr(args, "shutdown_timeout", None)  # a flag of torch 2.12
    source = "--shutdown_timeout"
    if seconds is None:
        source = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        seconds = os.environ.get(source, SHUTDOWN_SECONDS)
    try:
        args.seconds_to_end = int(seconds)
    except ValueError:
        args.seconds_to_end = -1
    if args.seconds_to_end < 0:
        raise ValueError(f"{source}: got {seconds!r}, expected whole seconds from 0 on")


def _on_one_machine(args: argparse.Namespace) -> bool:
    """Whether the command line describes a job on this machine alone."""
    if args.standalone:
        return True
    if args.nnodes not in ("1", "1:1") or args.rdzv_backend != "static" or args.rdzv_endpoint:
        return False
    # torchrun ignores the address and the node's rank if no port is given.
    return args.master_port is None or (int(args.node_rank) == 0 and args.master_addr in LOOPBACK_HOSTS)


def _apply(nodes: Nodes, own: str, args: argparse.Namespace) -> None:
    """Translate the nodes of the job into torchrun's flags; `own` is the address of this machine, or empty."""
    args.standalone, args.rdzv_backend, args.rdzv_endpoint = False, "static", ""
    args.nnodes, args.node_rank, args.master_port = nodes.count, nodes.rank or 0, nodes.port
    host = f"[{nodes.host}]" if ":" in nodes.host else nodes.host
    if not nodes.several:
        args.master_addr = LOOPBACK_HOSTS[0]
    elif nodes.rank is not None:
        args.master_addr = host
    else:
        args.rdzv_backend, args.rdzv_endpoint = "c10d", f"{host}:{nodes.port}"
        serves = nodes.serves
        if serves is not None and "is_host" not in args.rdzv_conf:
            args.rdzv_conf = f"{args.rdzv_conf},is_host={int(serves)}".lstrip(",")
        # Without it torchrun uses this machine's host name, which others may be unable to resolve.
        args.local_addr = own or None


def _warn_of_public_address(args: argparse.Namespace) -> None:
    place = args.rdzv_endpoint
    # An IPv6 address has brackets if a port follows.
    host = re.sub(r":\d*$", "", place) if place else args.master_addr
    address = public_address(host.strip("[]"))
    if address is not None:
        _say(
            f"warning: {address} is a public address, and torch's store there accepts every connection, which can then "
            "run code in every rank. Use an address in a private network, or a firewall that admits only the machines "
            "of the job."
        )


def _visible_gpus(args: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count() if args.gpus is None else len(args.gpus)


def _prepare(args: argparse.Namespace, nodes: Nodes | None, cleanup: ExitStack) -> None:
    """Turn the command line into torchrun's, and set the variables that its ranks inherit."""
    variables: dict[str, str] = {}
    hosts: tuple[str, ...] = ()
    own = ""
    if nodes is not None:
        hosts, own = nodes.addresses, nodes.own_address or ""
        _apply(nodes, own, args)
    if _on_one_machine(args):
        from dpfuse.job import rendezvous

        rendezvous.register()
        args.standalone, args.nnodes = False, "1"
        args.rdzv_backend = rendezvous.BACKEND
        args.rdzv_endpoint = f"{rendezvous.HOST}:{args.master_port or 0}"
        variables.update(one_machine_variables())
        hosts, own = (rendezvous.HOST,), rendezvous.HOST
    else:
        _warn_of_public_address(args)
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(own)):
            # Without it gloo uses the address to which the host name resolves.
            variables["GLOO_SOCKET_IFNAME"] = interface
    if args.master_port is None:
        args.master_port = MASTER_PORT
    count = int(args.nproc_per_node)
    if "OMP_NUM_THREADS" not in os.environ and count > 1:
        variables["OMP_NUM_THREADS"] = str(cores_per_rank(count))
    if args.gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(args.gpus)
    cleanup.enter_context(environment(variables))
    wrapped = not (args.no_python or args.run_path)  # whether rank_program runs the program
    unredirected = args.redirects == args.tee == "0"
    args.worker_logs = args.log_dir if unredirected and wrapped and not args.logs_specs else None
    if args.worker_logs is not None or (unredirected and args.log_dir is None):
        # torchrun keeps the ranks' error records in a folder, and would not remove it.
        args.log_dir = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="dpfuse-launch-"))
    if wrapped:
        kind = "module" if args.module else "script"
        launch = rank_program.Launch(
            os.getpid(), _visible_gpus(args), hosts, own, args.worker_logs is not None, args.seconds_to_end
        )
        told = json.dumps(asdict(launch))
        args.training_script_args = [told, kind, args.training_script, *args.training_script_args]
        args.training_script = rank_program.__file__
        args.module = False


def _run(args: argparse.Namespace) -> None:
    """Run the job as torchrun's own `run` does, with our logs and with `ranks_end_within`."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    from dpfuse.job.shutdown import ranks_end_within

    config, command, arguments = config_from_args(args)
    if args.worker_logs is not None:
        from dpfuse.job.logs import WorkerLogs

        shown = {int(rank) for rank in (args.local_ranks_filter or "0").split(",")}
        config.logs_specs = WorkerLogs(args.worker_logs, args.log_dir, shown)
    with ranks_end_within(args.seconds_to_end):
        elastic_launch(config=config, entrypoint=command)(*arguments)


def _say(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the job that the command line describes and wait for it.

    Args:
        arguments: the command line without the program's name; None takes `sys.argv`.

    Returns:
        The exit code: 0 if every rank ended well; else that of the rank that failed first (128 + n if signal n
        killed it); 128 + n if the launcher itself got signal n; 1 if the job could not be started; 2 if this
        machine is not in the list of `--ips`.

    Raises:
        SystemExit: code 2 for a wrong command line, 0 for `--help`.

    Example:
        >>> from dpfuse.launch import main
        >>> try:
        ...     main(["--nproc_per_node", "2", "no_such_script.py"])  # a message on stderr, exit code 2
        ... except SystemExit as end:
        ...     print(end.code)
        2

    Source: PyTorch's torchrun, whose flags all work, and Paddle's launchers, whose flags name cards and machines.
    """
    args = _parse(list(sys.argv[1:] if arguments is None else arguments))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        nodes = None if args.nodes is None else args.nodes.located()
    except ValueError as error:
        _say(str(error))
        return 2
    with ExitStack() as cleanup:
        _prepare(args, nodes, cleanup)
        try:
            _run(args)
        except ChildFailedError as error:
            return _report(error.failures, args)
        except SignalException as error:
            name = signal.Signals(error.sigval).name
            _say(f"got {name}; every rank was ended")
            return 128 + int(error.sigval)
        except (ValueError, AssertionError, RuntimeError, OSError, RendezvousError) as error:
            _say(f"the job could not be started or supervised: {str(error).rstrip('.')}.{_remedy(error)}")
            return 1
    return 0


def _remedy(error: BaseException) -> str:
    if "EADDRINUSE" in f"{error} {error.__cause__}":
        return " A port that this job needs is taken: give another one, the same on every machine."
    return ""


def _report(failures: Mapping[int, Any], args: argparse.Namespace) -> int:
    told = []
    for number, failure in failures.items():
        ended = RankFailure(number, int(failure.pid), int(failure.exitcode), float(failure.timestamp))
        record = read_record(failure.error_file)
        told.append(record.explains(ended) if record else ended)
    first = first_failure(told)
    trace = log = ""
    if args.worker_logs is not None:
        from dpfuse.job.logs import last_lines, worker_log

        path = worker_log(args.worker_logs, int(failures[first.rank].local_rank))
        log = f" Its log is {path}."
        trace = f"\n{first.traceback or last_lines(path)}"
    elif args.redirects != "0":
        # Without redirection the rank has printed its traceback on the console.
        trace = f"\n{first.traceback}"
    _say(
        f"{first}; it was the first rank to fail, and the others were ended. Exit code {first.shell_code}.{log}{trace}"
    )
    return first.shell_code
