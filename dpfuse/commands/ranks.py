"""Where a command's ranks come from: started here, or those of the job that this process belongs to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dpfuse.commands.user_model import Target, build
from dpfuse.engine.collective import group_device, resolve_group
from dpfuse.engine.votes import agree_on_success
from dpfuse.errors import DPFuseError
from dpfuse.job import init_parallel_env, spawn
from dpfuse.job.variables import RankEnvironment, read_environment

__all__ = ["build_on_all_ranks", "reports_here", "run_on_ranks", "say"]

RANKS_WITHOUT_GPUS = 2


def reports_here() -> bool:
    """Whether this process is to write what a command finds: it starts the ranks, or is rank 0 itself."""
    job = _job()
    return job is None or job.rank == 0


def run_on_ranks(function: Callable[..., Any], args: Sequence[Any], count: int | None) -> Any:
    """What `function(*args)` returns on rank 0, where `reports_here()`; elsewhere None.

    Args:
        function: importable; called on every rank, inside the default process group.
        args: can be pickled.
        count: ranks to start; None is one for each GPU, without GPUs two. Inside a job it must be None.

    Raises:
        DPFuseError: a rank failed, after all have ended; there cannot be so many ranks. Inside a job an exception
            of `function` comes as it is, for the launcher to see.
    """
    job = _job()
    if job is not None:
        if count is not None:
            raise DPFuseError(
                f"--nproc_per_node={count} was given on rank {job.rank} of a job of {job.world_size}, which takes part "
                "in that one; expected it to the launcher, or without RANK and WORLD_SIZE in the environment"
            )
        return _run(function, *args)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        context = spawn(_run, (function, *args), nprocs=count or gpus or RANKS_WITHOUT_GPUS)
    except ValueError as error:  # so many ranks, or such a backend, cannot be
        raise DPFuseError(str(error)) from error
    return context.return_queues[0].get()


def build_on_all_ranks(place: str) -> Target:
    """The target, on the GPU of this rank where it has one. The ranks draw different random numbers.

    Raises:
        DPFuseError: the factory failed, or returned something else, on some rank; on every rank.
    """
    group = resolve_group(None)
    assert group is not None
    torch.manual_seed(group.rank())
    return agree_on_success(lambda: build(place, group_device(group)), group, f"the model of {place}")


def say(text: str) -> None:
    """Tell the user what is going on, once."""
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
        say("one rank: nothing travels, and only the cost of the buckets themselves shows")
    result = function(*args)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return result if first else None
