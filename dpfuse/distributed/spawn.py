"""`spawn`: one function on several ranks of this machine. Processes are torch.multiprocessing's."""

from __future__ import annotations

import difflib
import gc
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from dpfuse.distributed import rank as rank_program
from dpfuse.distributed.devices import (
    check_backend,
    choose_backend,
    cores_per_rank,
    cpu_count,
    select_gpus,
)
from dpfuse.distributed.failure import RankFailure, first_failure, read_record
from dpfuse.distributed.variables import environment, one_machine_variables
from dpfuse.errors import DPFuseError

__all__ = ["ReturnQueue", "SpawnContext", "spawn"]

# After a rank fails, its peers get this long to end by themselves, and again after SIGTERM, before SIGKILL.
GRACE_SECONDS = 2.0
OPTIONS = ("start_method", "backend", "gpus")

# A context that nobody keeps must live as long as its ranks: it serves their store.
_running: set[SpawnContext] = set()


@dataclass(frozen=True)
class _Job:
    """What every rank of one spawn is told; the rank's own number comes beside it."""

    variables: dict[str, str]
    folder: str
    parent: int  # the pid to die with, 0 where that cannot be promised
    forked: bool
    threads: int  # for torch on the CPU; 0 leaves torch's own choice


class _Folder:
    """A folder that only this user can open, removed when nobody needs it any more.

    Not TemporaryDirectory: it warns when it is left to the garbage collector, and a forked rank that drops its
    copy would empty the folder of all.
    """

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix="dpfuse-spawn-")  # mkdtemp gives it mode 0700
        weakref.finalize(self, _remove, self.name, os.getpid())


def _remove(name: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(name, ignore_errors=True)


def _result_path(folder: str, rank: int) -> Path:
    return Path(folder, f"result-{rank}.pickle")


def _error_path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"error-{rank}.json")


def _run_rank(rank: int, job: _Job, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if job.forked:
        # Leftovers of the parent, such as a store with threads that this process does not have, must not be
        # collected here.
        gc.freeze()
    if job.parent:
        rank_program.die_with_parent(job.parent)
    os.environ.update(job.variables, RANK=str(rank), LOCAL_RANK=str(rank))
    error_path = _error_path(job.folder, rank)
    # An exception that torch or the user's program records goes to the same place.
    os.environ["TORCHELASTIC_ERROR_FILE"] = error_path
    if job.threads:
        torch.set_num_threads(job.threads)
    try:
        result = func(*args)
        try:
            data = pickle.dumps(result)
        except Exception as error:
            raise TypeError(
                f"rank {rank}: func returned a {type(result).__name__}, which cannot be sent back ({error}); "
                "return something that pickle can handle, such as numbers, lists or tensors."
            ) from error
        # The name appears when the content is whole.
        draft = _result_path(job.folder, rank).with_suffix(".part")
        draft.write_bytes(data)
        draft.rename(_result_path(job.folder, rank))
    except SystemExit as error:
        if error.code is not None and error.code != 0:
            rank_program.record_exception(error, error_path)
            raise
    except Exception as error:
        rank_program.record_exception(error, error_path)
        raise
    rank_program.end_process()


class ReturnQueue:
    """Holds what func returned on one rank; `get()` reads it as often as wanted.

    A file rather than a pipe: a rank with a large result can then end before anybody reads it.
    """

    def __init__(self, process: Any, rank: int, folder: _Folder) -> None:
        self._process = process
        self._rank = rank
        self._folder = folder  # lives as long as somebody may read from it

    def get(self) -> Any:
        """The value, once the rank has ended; DPFuseError where it ended without one."""
        self._process.join()
        path = _result_path(self._folder.name, self._rank)
        if not path.exists():
            raise DPFuseError(
                f"rank {self._rank} left no return value: it ended with exit code {self._process.exitcode}. "
                "Call join() on the context to see its error."
            )
        return pickle.loads(path.read_bytes())


class SpawnContext:
    """The running ranks of one `spawn`.

    Attributes:
        processes: the process of each rank, by rank.
        return_queues: for each rank a queue whose `get()` gives func's return value there.
    """

    def __init__(self, context: ProcessContext, folder: _Folder, store: object) -> None:
        self._context = context
        self._folder = folder
        self._store = store
        self.processes: list[Any] = list(context.processes)
        self.return_queues = [ReturnQueue(process, rank, folder) for rank, process in enumerate(self.processes)]
        _running.add(self)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until some rank ends; when one has failed, end the others and raise.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.

        Returns:
            True when all ranks have ended well, False while some still run: call it in a loop, as Paddle's
            and torch's.

        Raises:
            DPFuseError: a rank failed. The text names the rank that failed first and shows its traceback; the
                cause is what torch raised on the rank whose end it saw first (ProcessRaisedException or
                ProcessExitedException), which may be a peer's "connection closed".
        """
        try:
            done = self._context.join(timeout, grace_period=GRACE_SECONDS)
        except ProcessException as error:
            self._close()
            first = self._first(error)
            told = first.traceback and not first.error.startswith("SystemExit")
            trace = f"\n\n{first.traceback}" if told else ""
            hint = ""
            if not first.error and first.exit_code == 1:
                hint = (
                    " before or outside func; its own output above says why"
                    " (is the call under `if __name__ == '__main__':`?)"
                )
            raise DPFuseError(
                f"spawn: {first}{hint}; it was the first of {len(self.processes)} ranks to fail, the others "
                f"were ended.{trace}"
            ) from error
        if done:
            self._close()
        return bool(done)

    def _close(self) -> None:
        self._store = None
        _running.discard(self)

    def _first(self, error: Any) -> RankFailure:
        # torch has waited GRACE_SECONDS for peers before it sends any signal of its own.
        before_signals = time.time() - GRACE_SECONDS
        failures = []
        for rank, process in enumerate(self.processes):
            record = read_record(_error_path(self._folder.name, rank))
            failure = RankFailure(rank, process.pid, process.exitcode, before_signals)
            if record is not None:
                failure = record.explains(failure)
            elif rank == error.error_index:
                # Processes are watched all the time here, so a sudden end that was noticed first came first.
                return failure
            if failure.exit_code != 0:
                failures.append(failure)
        return first_failure(failures)


def _unknown_option(name: str) -> ValueError:
    close = difflib.get_close_matches(name, (*OPTIONS, "func", "args", "nprocs", "join", "daemon"), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return ValueError(f"spawn: got the option {name!r}, expected only {', '.join(OPTIONS)}{hint}")


def _count_ranks(nprocs: int, cards: Sequence[str] | None, backend: str) -> int:
    if isinstance(nprocs, bool) or not isinstance(nprocs, int):
        raise TypeError(f"spawn: nprocs must be an integer, got {nprocs!r}")
    if nprocs < 1 and nprocs != -1:
        raise ValueError(f"spawn: nprocs must be at least 1, or -1 for all GPUs (else all cores), got {nprocs}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cards is not None:
        if nprocs not in (-1, len(cards)):
            raise ValueError(
                f"spawn: gpus names {len(cards)} card(s), but nprocs is {nprocs}; expected the same number. "
                "Leave nprocs out, or name one card for each rank."
            )
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

    func gets no rank argument: it calls `init_parallel_env()` (torch's own `init_process_group()` works as
    well) and asks `get_rank()`. The ranks meet on 127.0.0.1 only. A rank that fails ends the others within
    seconds. On Linux no rank outlives this process where the call is made from its main thread.

    Args:
        func: a function that other processes can import: at the top level of a module, no lambda.
        args: its arguments.
        nprocs: number of ranks; -1 is one for each visible GPU, without GPUs one for each core.
        join: wait for all ranks; False returns at once.
        daemon: end the ranks when this process ends by itself, without waiting for them.
        **options: `start_method` ("spawn" by default, else "fork" or "forkserver"); `backend` ("nccl",
            "gloo", …: what `init_parallel_env` uses; by default NCCL with GPUs, else gloo); `gpus`
            (physical cards for the ranks, "0,1" or [0, 1]).

    Returns:
        A context with `processes`, `join(timeout=None)` and `return_queues`:
        `context.return_queues[r].get()` is what func returned on rank r.

    Raises:
        ValueError: a wrong number, option, backend, card, or a func that cannot be sent to another process.
        TypeError: func is not callable, nprocs no integer, args no sequence.
        DPFuseError: a rank failed (only with join=True; else `context.join()` raises it). Names rank and
            exception.

    Example:
        >>> import math, dpfuse.distributed as distributed
        >>> context = distributed.spawn(math.sqrt, args=(16.0,), nprocs=1)
        >>> [queue.get() for queue in context.return_queues]
        [4.0]

    Source: Paddle's `paddle.distributed.spawn`, built on `torch.multiprocessing.start_processes`.
    """
    for name in options:
        if name not in OPTIONS:
            raise _unknown_option(name)
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
    from dpfuse.distributed.rendezvous import HOST, loopback_store

    store = loopback_store()
    folder = _Folder()
    threads = 0 if "OMP_NUM_THREADS" in os.environ or count == 1 else cores_per_rank(count)
    variables = {
        **one_machine_variables(),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        # Ranks connect to the store of this process; otherwise rank 0 would serve one on every interface.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    if backend is not None:
        variables["DPFUSE_BACKEND"] = backend
    if cards is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    # The kernel watches the thread that forks: one that ends before the ranks would take them along. A fork
    # server is not this process at all.
    mortal = start_method != "forkserver" and threading.current_thread() is threading.main_thread()
    job = _Job(variables, folder.name, os.getpid() if mortal else 0, start_method == "fork", threads)
    # Inherited too, since the ranks import torch and the user's module before they run any line of ours.
    with environment(variables):
        return SpawnContext(_start(func, args, count, daemon, start_method, job), folder, store)


def _start(
    func: Callable[..., Any], args: tuple[Any, ...], count: int, daemon: bool, start_method: str, job: _Job
) -> ProcessContext:
    before = set(mp.active_children())
    try:
        context = start_processes(
            _run_rank, (job, func, args), count, join=False, daemon=daemon, start_method=start_method
        )
    except BaseException as error:
        # Ranks that did start wait for those that never will.
        for process in set(mp.active_children()) - before:
            process.kill()
            process.join()
        if isinstance(error, (pickle.PicklingError, AttributeError, TypeError)):
            raise ValueError(
                f"spawn: func {getattr(func, '__qualname__', func)!r} or its args cannot be sent to another "
                f"process ({error}); expected a function at the top level of a module (no lambda, no "
                "function inside a function) and arguments that pickle can handle."
            ) from error
        raise
    assert isinstance(context, ProcessContext)
    return context
