"""The ranks of a command: it starts them, or uses those of the job to which this process belongs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dpfuse.comm.collective import group_device, resolve_group
from dpfuse.comm.votes import agree_on_success
from dpfuse.commands.user_model import Target, build
from dpfuse.errors import DPFuseError
from dpfuse.job import init_parallel_env, spawn
from dpfuse.job.devices import visible_gpus
from dpfuse.job.read_environment import RankEnvironment, read_environment
from dpfuse.job.spawn_context import RankError

__all__ = ["build_on_all_ranks", "reports_here", "run_on_ranks", "say"]

RANKS_WITHOUT_GPUS = 2
ANNOUNCED = f"{DPFuseError.__name__}: "  # how the record of a rank begins that has raised our own error


def reports_here() -> bool:
    """Whether this process writes the results: it starts the ranks, or is rank 0."""
    job = _job()
    return job is None or job.rank == 0


def run_on_ranks(function: Callable[..., Any], args: Sequence[Any], count: int | None) -> Any:
    """Run `function(*args)` on every rank. Return rank 0's result if `reports_here()`, else None.

    Args:
        function: can be imported; called on every rank, inside the default process group.
        args: its arguments, which can be pickled.
        count: ranks to start; None starts one for each GPU, or two without GPUs. Inside a job it must be None.

    Raises:
        DPFuseError: a rank failed, and all ranks have ended; or `count` ranks are not possible. Inside a job an
            exception of `function` is raised unchanged, for the launcher.
    """
    job = _job()
    if job is not None:
        if count is not None:
            raise DPFuseError(
                f"--nproc_per_node={count} was given on rank {job.rank} of a job of {job.world_size}; expected no such "
                "flag inside a job. Give it to the launcher, or remove RANK and WORLD_SIZE from the environment"
            )
        return _run(function, *args)
    try:
        context = spawn(_run, (function, *args), nprocs=count or visible_gpus() or RANKS_WITHOUT_GPUS)
    except ValueError as error:  # the number of ranks or the backend is not possible here
        raise DPFuseError(str(error)) from error
    except RankError as error:
        if error.failure is None or not error.failure.error.startswith(ANNOUNCED):
            raise
        # Its text says all, and the traceback would show the lines of this command.
        text = error.failure.error.removeprefix(ANNOUNCED)
        # What ranks have told each other names the rank that failed, and is the same on all of them.
        named = "failed on rank" in text.partition("\n")[0]
        raise DPFuseError(text if named else f"rank {error.failure.rank}: {text}") from error
    return context.return_queues[0].get()


def build_on_all_ranks(place: str) -> Target:
    """Build the target, on the GPU of this rank if it has one. The ranks draw different random numbers.

    Raises:
        DPFuseError: the factory failed or returned something else on some rank; raised on every rank.
    """
    group = resolve_group(None)
    assert group is not None
    torch.manual_seed(group.rank())
    return agree_on_success(lambda: build(place, group_device(group)), group, f"the model of {place}")


def say(text: str) -> None:
    """Print a progress message, on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _job() -> RankEnvironment | None:
    try:
        return read_environment()
    except ValueError as error:
        raise DPFuseError(str(error)) from error


def _run(function: Callable[..., Any], *args: Any) -> Any:
    init_parallel_env()
    if dist.get_world_size() == 1:
        say("one rank: nothing is sent, so the times show only the cost of the buckets themselves")
    result = function(*args)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return result if first else None
