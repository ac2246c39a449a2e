"""`python -m dpfuse.launch`: torchrun with Paddle's flags, loopback on one machine, and errors that name the rank.

Processes, restarts and logs are torchrun's (`torch.distributed.run`). paddle_launch_flags.py reads the command line,
and nodes.py those of Paddle's flags that describe other machines. signals.py says what signals do. What runs inside a
rank is in rank_program.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from dpfuse.job import rank_program
from dpfuse.job.devices import device_variables, gpus_of_ranks
from dpfuse.job.failure import RankFailure, explained, first_failure, shown
from dpfuse.job.interfaces import interface_of, public_address
from dpfuse.job.nodes import MASTER_PORT, Nodes
from dpfuse.job.paddle_launch_flags import parse, say
from dpfuse.job.read_environment import LOOPBACK_HOSTS, environment, one_machine_variables
from dpfuse.job.signals import Signals
from dpfuse.job.stopped import all_stopped
from dpfuse.startup import REPLACEMENT, startup_variables

__all__ = ["main", "run_job"]


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
        say(
            f"warning: {address} is a public address, and torch's store there accepts every connection, which can then "
            "run code in every rank. Use an address in a private network, or a firewall that admits only the machines "
            "of the job."
        )


def _prepare(args: argparse.Namespace, cleanup: ExitStack) -> None:
    """Turn the command line into torchrun's, and set the variables that its ranks inherit."""
    variables: dict[str, str] = {}
    hosts: tuple[str, ...] = ()
    own = ""
    nodes: Nodes | None = args.nodes
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
    variables.update(device_variables(int(args.nproc_per_node), args.gpus))
    if args.patch:
        variables.update(startup_variables(REPLACEMENT, os.environ))
    if args.log_level is not None:
        variables["LOGLEVEL"] = args.log_level  # torch reads it when it makes a logger
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(args.log_level)
    cleanup.enter_context(environment(variables))
    args.wrapped = wrapped = not (args.no_python or args.run_path)  # whether rank_program runs the program
    unredirected = args.redirects == args.tee == "0"
    args.worker_logs = args.log_dir if unredirected and wrapped and not args.logs_specs else None
    if args.worker_logs is not None or (unredirected and args.log_dir is None):
        # torchrun keeps the ranks' error records in a folder, and would not remove it.
        args.log_dir = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="dpfuse-launch-"))
    if wrapped:
        kind = "module" if args.module else "script"
        launch = rank_program.Launch(
            os.getpid(),
            gpus_of_ranks(args.gpus),
            hosts,
            own,
            args.worker_logs is not None,
            args.seconds_to_end,
            args.shows_interrupts,
        )
        told = json.dumps(asdict(launch))
        args.training_script_args = [told, kind, args.training_script, *args.training_script_args]
        args.training_script = rank_program.__file__
        args.module = False


def _run(args: argparse.Namespace, signals: Signals, records: list[str]) -> None:
    """Run the job as torchrun's own `run` does, with our logs, signals and `ranks_end_within`."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    from dpfuse.job.shutdown import machine_0_leaves_last, ranks_end_within, silent_after_interrupt

    config, command, arguments = config_from_args(args)
    if args.worker_logs is not None:
        from dpfuse.job.logs import WorkerLogs

        shown = {int(rank) for rank in (args.local_ranks_filter or "0").split(",")}
        config.logs_specs = WorkerLogs(args.worker_logs, args.log_dir, shown)
    with ExitStack() as around:
        # A worker of a loader would show a traceback, and its rank one of a worker that has died.
        spared = () if args.shows_interrupts or not args.wrapped else (signal.SIGINT,)
        # Not SIGINT, for which Python always has one; and a shell runs a trap only when its child has ended.
        handled = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) if args.wrapped else ()
        config.signals_to_handle = signals.end_by(config.signals_to_handle, args.seconds_to_end, spared, handled)
        around.enter_context(ranks_end_within(args.seconds_to_end, signals, hold=args.wrapped, records=records))
        if not args.shows_interrupts:
            around.enter_context(silent_after_interrupt(signals))
        if config.max_nodes > 1:
            from dpfuse.job.meeting import tells_while_waiting

            place = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
            settings = config.rdzv_configs or {}
            around.enter_context(tells_while_waiting(say, place, args.nnodes, args.rdzv_backend, settings))
            if args.rdzv_backend == "static":
                around.enter_context(machine_0_leaves_last())
        elastic_launch(config=config, entrypoint=command)(*arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the job that the command line describes and wait for it.

    Args:
        arguments: the command line without the program's name; None takes `sys.argv`.

    Returns:
        The exit code: 0 if every rank ended well; else that of the rank that failed first (128 + n if signal n
        killed it); `--requeue_exit` (0) if the ranks have stopped together; 128 + n if the launcher itself got signal
        n; 1 if the job could not be started.

    Raises:
        SystemExit: code 2 for a wrong command line, or a machine that is not in its list of `--ips`; 0 for `--help`.

    Example:
        >>> from dpfuse.launch import main
        >>> try:
        ...     main(["--nproc_per_node", "2", "no_such_script.py"])  # a message on stderr, exit code 2
        ... except SystemExit as end:
        ...     print(end.code)
        2

    Source: PyTorch's torchrun, whose flags all work, and Paddle's launchers, whose flags name cards and machines.
    """
    return run_job(list(sys.argv[1:] if arguments is None else arguments), last=arguments is None)


def run_job(words: list[str], *, last: bool = False, shows_interrupts: bool = True) -> int:
    """Start a job as `main` does, and return its exit code.

    Args:
        words: the command line.
        last: whether the process ends after this.
        shows_interrupts: False prints one line after Ctrl-C: no traceback of a rank, and none of torchrun's lines.
    """
    with Signals(last=last) as signals:
        return _launch(words, signals, shows_interrupts)


def _launch(words: list[str], signals: Signals, shows_interrupts: bool) -> int:
    args = parse(words)
    args.shows_interrupts = shows_interrupts
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if args.nodes is not None and args.nodes.doubt:
        say(f"warning: {args.nodes.doubt}")
    with ExitStack() as cleanup:
        _prepare(args, cleanup)
        code = 0
        records: list[str] = []
        try:
            _run(args, signals, records)
        except ChildFailedError as error:
            if signals.asked is None:
                code = _report(error.failures, args)
        except SignalException as error:
            return _ended_by(signal.Signals(error.sigval))
        except (ValueError, AssertionError, RuntimeError, OSError, RendezvousError) as error:
            say(f"the job could not be started or supervised: {str(error).rstrip('.')}.{_remedy(error)}")
            code = 1
        if code == 0 and all_stopped(records):
            by = f" after {signals.asked.name}" if signals.asked is not None else ""
            say(f"the ranks have stopped together{by}; exit code {args.requeue_exit}")
            return int(args.requeue_exit)
        return code if signals.asked is None else _ended_by(signals.asked)


def _ended_by(number: signal.Signals) -> int:
    say(f"got {number.name}; every rank was ended")
    return 128 + number


def _remedy(error: BaseException) -> str:
    if "EADDRINUSE" in f"{error} {error.__cause__}":
        return " A port that this job needs is taken: give another one, the same on every machine."
    return ""


def _report(failures: Mapping[int, Any], args: argparse.Namespace) -> int:
    first = first_failure(
        [
            explained(RankFailure(rank, int(each.pid), int(each.exitcode), float(each.timestamp)), each.error_file)
            for rank, each in failures.items()
        ]
    )
    if args.worker_logs is None and args.redirects == "0":
        # Without redirection the rank has printed its traceback on the console.
        first = replace(first, traceback="")
    first = shown(first, args.worker_logs)
    trace = log = ""
    if args.worker_logs is not None:
        from dpfuse.job.logs import last_lines, worker_log

        path = worker_log(args.worker_logs, int(failures[first.rank].local_rank))
        log = f" Its log is {path}."
        trace = f"\n{first.traceback or last_lines(path)}"
    elif args.redirects != "0":
        trace = f"\n{first.traceback}"
    say(f"{first}; it was the first rank to fail, and the others were ended. Exit code {first.shell_code}.{log}{trace}")
    return first.shell_code
