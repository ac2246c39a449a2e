"""`spawn`: run one function on several ranks of this machine, as processes of torch.multiprocessing."""

from __future__ import annotations

import difflib
import gc
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessContext, start_processes

from dpfuse.job import rank_program
from dpfuse.job.devices import (
    check_backend,
    check_one_rank_each,
    choose_backend,
    cpu_count,
    device_variables,
    gpus_of_ranks,
    select_gpus,
    visible_gpus,
)
from dpfuse.job.read_environment import environment, one_machine_variables
from dpfuse.job.spawn_context import RankFolder, SpawnContext, began_path, error_path, result_path

__all__ = ["spawn"]

OPTIONS = ("start_method", "backend", "gpus")
OLDER_NAMES_OF_GPUS = ("selected_gpus", "selected_devices")
MACHINES = "spawn starts ranks on this machine only; for several machines use `python -m dpfuse.launch --ips=…`"
# Options of Paddle's spawn that have no effect here, and what to do instead.
UNUSED_OPTIONS = {
    "ips": MACHINES,
    "cluster_node_ips": MACHINES,
    "node_ip": MACHINES,
    "started_port": "spawn takes a free port by itself; leave the option out",
    "use_paddlecloud": "leave the option out",
    "xpus": "the ranks run on GPUs (name cards with gpus=) or on the CPU",
    "print_config": "leave the option out, and print ParallelEnv() in the function",
}


@dataclass(frozen=True)
class _Job:
    """What every rank of one spawn receives, apart from its own number."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    variables: dict[str, str]
    folder: str
    parent: int  # of the process with which the rank ends; 0 if that is not possible
    gpus: int  # the number that the ranks see
    forked: bool


def _run_rank(rank: int, job: _Job) -> None:
    if job.forked:
        # Objects of the parent must not be collected here, such as a store whose threads do not exist in this process.
        gc.freeze()
    if job.parent:
        rank_program.die_with_parent(job.parent)
    os.environ.update(job.variables, RANK=str(rank), LOCAL_RANK=str(rank))
    host = job.variables["MASTER_ADDR"]
    rank_program.set_paddle_variables(os.environ, job.gpus, (host,), host)
    record = error_path(job.folder, rank)
    # Exceptions that torch or the user's program records go to the same file.
    os.environ["TORCHELASTIC_ERROR_FILE"] = record
    if "OMP_NUM_THREADS" in job.variables:  # a forked rank has torch, which has read the variable
        torch.set_num_threads(int(job.variables["OMP_NUM_THREADS"]))
    began_path(job.folder, rank).touch()
    try:
        result = job.func(*job.args)
        try:
            data = pickle.dumps(result)
        except Exception as error:
            raise TypeError(
                f"rank {rank}: func returned a {type(result).__name__}, which cannot be sent back ({error}); "
                "return something that pickle can handle, such as numbers, lists or tensors."
            ) from error
        # The file gets its name only when its content is complete.
        draft = result_path(job.folder, rank).with_suffix(".part")
        draft.write_bytes(data)
        draft.rename(result_path(job.folder, rank))
    except BaseException as error:  # also one that is no Exception: torch and Python would not tell its text
        code = rank_program.exit_code_of(error)
        if code:
            rank_program.record_exception(error, record)
            rank_program.end_within(rank_program.SECONDS_TO_END, code)
            # torch would pickle the traceback of a raised exception into a file in a folder that every user can write
            # to, and would take a KeyboardInterrupt for a success.
            sys.exit(code)
    rank_program.end_process(forked=job.forked)


def _check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under their present names."""
    checked = {}
    for name, value in options.items():
        if name in UNUSED_OPTIONS:
            raise ValueError(
                f"spawn: the option {name!r} of Paddle's spawn has no effect here: {UNUSED_OPTIONS[name]}."
            )
        if name in OLDER_NAMES_OF_GPUS:
            if len({"gpus", *OLDER_NAMES_OF_GPUS}.intersection(options)) > 1:
                raise ValueError(f"spawn: got {name} beside another name of gpus; name the cards once, with gpus=")
            warnings.warn(
                f"spawn: {name} is Paddle's older name of gpus; write gpus=", DeprecationWarning, stacklevel=3
            )
            name = "gpus"
        elif name not in OPTIONS:
            close = difflib.get_close_matches(name, (*OPTIONS, "func", "args", "nprocs", "join", "daemon"), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"spawn: got the option {name!r}, expected only {', '.join(OPTIONS)}{hint}")
        checked[name] = value
    return checked


def _count_ranks(nprocs: int, cards: Sequence[str] | None, backend: str) -> int:
    if isinstance(nprocs, bool) or not isinstance(nprocs, int):
        raise TypeError(f"spawn: nprocs must be an integer, got {nprocs!r}")
    if nprocs < 1 and nprocs != -1:
        raise ValueError(f"spawn: nprocs must be at least 1, or -1 for all GPUs (else all cores), got {nprocs}")
    gpus = visible_gpus()
    if cards is not None:
        check_one_rank_each(cards, len(cards) if nprocs == -1 else nprocs, "spawn: gpus", "nprocs")
        return len(cards)
    if nprocs == -1:
        return gpus or cpu_count()
    if "nccl" in backend and nprocs > gpus:
        raise ValueError(
            f"spawn: nprocs is {nprocs}, but only {gpus} GPU(s) are visible and NCCL needs one for each "
            "rank. Start fewer ranks, or pass backend='gloo' to let ranks share a GPU."
        )
    return nprocs


def _check_func(func: object, start_method: str) -> None:
    if not callable(func):
        raise TypeError(f"spawn: func must be callable, got {type(func).__name__}")
    if start_method not in mp.get_all_start_methods():
        raise ValueError(
            f"spawn: got start_method={start_method!r}, expected one of {', '.join(mp.get_all_start_methods())}"
        )
    if start_method == "fork":
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            raise ValueError(
                "spawn: start_method='fork' cannot be used once CUDA is in use in this process: a forked "
                "process cannot use it. Leave start_method out."
            )
    elif getattr(func, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"spawn: func {getattr(func, '__qualname__', func)!r} was defined at a prompt, in a notebook "
            "or with -c, where new processes cannot import it. Put it into a module, or pass "
            "start_method='fork'."
        )


def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> SpawnContext:
    """Run `func(*args)` on several ranks of this machine.

    func gets no rank argument: it calls `init_parallel_env()` (or torch's own `init_process_group()`) and then
    `get_rank()`. The ranks connect on 127.0.0.1 only. If a rank fails, the others are ended within seconds. On
    Linux, if the call is made in the main thread, no rank outlives this process.

    Args:
        func: a function that other processes can import: at the top level of a module, no lambda.
        args: its arguments. The ranks share the memory of tensors on the CPU, so make a model inside of `func`.
        nprocs: number of ranks; -1 means one for each visible GPU, or without GPUs one for each core.
        join: whether to wait for all ranks; False returns at once.
        daemon: whether the ranks end with this process, which then does not wait for them.
        **options: `start_method` ("spawn" by default, else "fork" or "forkserver"); `backend` ("nccl",
            "gloo", …: for `init_parallel_env`; by default NCCL with GPUs, else gloo); `gpus`
            (physical cards for the ranks, "0,1" or [0, 1]; Paddle's older names `selected_gpus` and
            `selected_devices` are deprecated).

    Returns:
        A context with `processes`, `join(timeout=None)` and `return_queues`:
        `context.return_queues[r].get()` is what func returned on rank r.

    Raises:
        ValueError: a number, an option, a backend or a card is wrong, or func cannot be sent to another process.
        TypeError: func is not callable, nprocs is not an integer, or args is not a sequence.
        DPFuseError: a rank failed; the text names rank and exception. With join=False `context.join()` raises it. Of a
            message, and of a traceback, that is longer than 20 KB the text has a part. The whole is in a file that
            the text names; it stays when the job is over.

    Example:
        >>> import math, dpfuse.job as distributed
        >>> context = distributed.spawn(math.sqrt, args=(16.0,), nprocs=1)
        >>> [queue.get() for queue in context.return_queues]
        [4.0]

    Source: Paddle's `paddle.distributed.spawn`, built on `torch.multiprocessing.start_processes`.
    """
    options = _check_options(options)
    start_method = options.get("start_method") or "spawn"
    _check_func(func, start_method)
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError(f"spawn: args must be a tuple or a list of arguments, got {args!r}; write args=(value,)")
    asked_backend, asked_gpus = options.get("backend"), options.get("gpus")
    backend = choose_backend() if asked_backend is None else check_backend(asked_backend, "spawn: backend")
    cards = None if asked_gpus is None else select_gpus(asked_gpus, "spawn: gpus")
    count = _count_ranks(nprocs, cards, backend)

    context = _begin(func, tuple(args), count, daemon, start_method, asked_backend, cards)
    if join:
        while not context.join():
            pass
    return context


def _begin(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    count: int,
    daemon: bool,
    start_method: str,
    backend: str | None,
    cards: Sequence[str] | None,
) -> SpawnContext:
    from dpfuse.job.rendezvous import HOST, loopback_store

    store = loopback_store()
    folder = RankFolder()
    variables = {
        **one_machine_variables(),
        **device_variables(count, cards),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        # Ranks connect to the store of this process; otherwise rank 0 would serve one on every interface.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if backend is not None:
        variables["DPFUSE_BACKEND"] = backend
    # The kernel ends the ranks when the thread that forked them ends, so only the main thread may ask for it. A
    # fork server is another process.
    dies_with_us = start_method != "forkserver" and threading.current_thread() is threading.main_thread()
    parent = os.getpid() if dies_with_us else 0
    job = _Job(func, args, variables, folder.name, parent, gpus_of_ranks(cards), start_method == "fork")
    # Also inherited, because the ranks import torch and the user's module before they run `_run_rank`.
    with environment(variables):
        return SpawnContext(_start(job, count, daemon, start_method), folder, store)


def _start(job: _Job, count: int, daemon: bool, start_method: str) -> ProcessContext:
    before = set(mp.active_children())
    try:
        context = start_processes(_run_rank, (job,), count, join=False, daemon=daemon, start_method=start_method)
    except BaseException as error:
        # The ranks that did start wait for the others, which never will.
        for process in set(mp.active_children()) - before:
            process.kill()
            process.join()
        if isinstance(error, (pickle.PicklingError, AttributeError, TypeError)):
            raise ValueError(
                f"spawn: func {getattr(job.func, '__qualname__', job.func)!r} or its args cannot be sent to another "
                f"process ({error}); expected a function at the top level of a module (no lambda, no "
                "function inside a function) and arguments that pickle can handle."
            ) from error
        raise
    assert isinstance(context, ProcessContext)
    return context
