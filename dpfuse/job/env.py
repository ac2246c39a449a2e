"""How a process joins its job: the process group, the rank in it, the GPU. Starts no process."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dpfuse.arguments import instance
from dpfuse.job.devices import choose_backend
from dpfuse.job.read_environment import (
    RankEnvironment,
    endpoints_of,
    one_machine_variables,
    read_environment,
)

__all__ = ["ParallelEnv", "get_rank", "get_world_size", "init_parallel_env"]


def _bind_device(job: RankEnvironment, backend: str) -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    if job.device_id >= count and "nccl" in backend:
        raise ValueError(
            f"rank {job.rank} (local rank {job.local_rank}) wants GPU {job.device_id}, but only {count} "
            "are visible and NCCL needs a GPU for each rank. Start fewer ranks, make more GPUs visible with "
            "CUDA_VISIBLE_DEVICES, or set DPFUSE_BACKEND=gloo to let ranks share a GPU."
        )
    device = torch.device("cuda", job.device_id % count)
    torch.cuda.set_device(device)
    return device


def init_parallel_env(timeout: float | timedelta | None = None) -> dist.ProcessGroup | None:
    """Join the job that this process was started in, and bind it to its GPU.

    Rank, world size and the address of rank 0 come from torch's variables (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, MASTER_PORT). If none of these is set, they come from Paddle's (PADDLE_TRAINER_ID,
    PADDLE_TRAINERS_NUM, with PADDLE_MASTER or PADDLE_TRAINER_ENDPOINTS). `python -m dpfuse.launch`,
    `dpfuse.spawn` and torchrun set them. The backend is NCCL with GPUs and gloo without; DPFUSE_BACKEND overrides
    this. On one machine GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME become `lo`, unless they are set.

    Call it before the model is built. A second call changes nothing and returns the same group.

    Args:
        timeout: seconds (or a timedelta) that a collective may take before it fails; None leaves torch's
            default (30 minutes with gloo, 10 with NCCL).

    Returns:
        The default process group; None, with one UserWarning, if no variable describes a job: then the program
        runs on one process.

    Raises:
        ValueError: a variable is missing, is not a number or is out of range; the backend is unknown; a rank has
            no GPU of its own under NCCL; the timeout is not positive.
        TypeError: `timeout` is not a number of seconds.

    Example:
        >>> import os, dpfuse.job as distributed
        >>> os.environ.update(RANK="0", WORLD_SIZE="1")  # what a launcher does; one rank needs no address
        >>> group = distributed.init_parallel_env()
        >>> group.size(), distributed.init_parallel_env() is group
        (1, True)
        >>> import torch.distributed
        >>> torch.distributed.destroy_process_group()
        >>> del os.environ["RANK"], os.environ["WORLD_SIZE"]

    The name and its use are those of Paddle's `paddle.distributed.init_parallel_env`.
    """
    wait = _timeout(timeout)
    if dist.is_initialized():
        return dist.group.WORLD
    job = read_environment()
    if job is None:
        warnings.warn(
            "init_parallel_env found no job in the environment (RANK and WORLD_SIZE, or PADDLE_TRAINER_ID "
            "and PADDLE_TRAINERS_NUM, are not set): this program runs on one process, averaging nothing. "
            "Start it with `python -m dpfuse.launch --nproc_per_node N script.py` to use more.",
            UserWarning,
            stacklevel=2,
        )
        return None
    backend = choose_backend()
    if job.one_machine:
        os.environ.update(one_machine_variables())
    device = _bind_device(job, backend)
    # Only if every collective runs on the GPU: a group bound to a GPU rejects gloo's CPU tensors.
    device = device if backend == "nccl" else None
    if "nccl" in backend:
        # A collective of a bucket must not wait for the kernels of backward that were queued before it.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    meeting: dict[str, Any]
    if job.master is None:
        meeting = {"store": HashStore()}
    else:
        host, port = job.master
        meeting = {"init_method": f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"}
    dist.init_process_group(
        backend, **meeting, rank=job.rank, world_size=job.world_size, timeout=wait, device_id=device
    )
    if backend == "gloo" and job.world_size > 1:
        # gloo returns as soon as this rank is connected. If it ended now, a peer that is still connecting would fail.
        dist.barrier()
    return dist.group.WORLD


def _timeout(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, timedelta)):
        raise TypeError(f"timeout must be seconds or a timedelta, got {type(timeout).__name__}")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"timeout must be a finite time above 0 s, got {seconds} s; None means torch's default")
    return timedelta(seconds=seconds)


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process.

    Args:
        group: a process group; None is the whole job.

    Returns:
        The rank in `group`; -1 if the process is not in it. Before `init_parallel_env` the rank according to the
        environment variables; 0 if they are not set.

    Raises:
        ValueError: the variables are incomplete or wrong, or a group was given and no group exists.

    Example:
        >>> import dpfuse.job as distributed
        >>> distributed.get_rank()
        0

    Source: Paddle's `paddle.distributed.get_rank`.
    """
    if dist.is_initialized():
        _check_group(group)
        return dist.get_rank(group)
    _reject_group(group)
    job = read_environment()
    return 0 if job is None else job.rank


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks.

    Args:
        group: a process group; None is the whole job.

    Returns:
        The size of `group`; -1 if the process is not in it. Before `init_parallel_env` the size according to the
        environment variables; 1 if they are not set.

    Raises:
        ValueError: the variables are incomplete or wrong, or a group was given and no group exists.

    Example:
        >>> import dpfuse.job as distributed
        >>> distributed.get_world_size()
        1

    Source: Paddle's `paddle.distributed.get_world_size`.
    """
    if dist.is_initialized():
        _check_group(group)
        return dist.get_world_size(group)
    _reject_group(group)
    job = read_environment()
    return 1 if job is None else job.world_size


def _check_group(group: object) -> None:
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        instance("group", group, (dist.ProcessGroup, NoneType), "None or a torch.distributed.ProcessGroup")


def _reject_group(group: object) -> None:
    if group is not None:
        raise ValueError(f"got group {group!r}, but no process group exists; call init_parallel_env() first")


class ParallelEnv:
    """What the environment variables say about this process, read once when the object is made.

    The names are those of Paddle's `paddle.distributed.ParallelEnv`. Two meanings are torch's: `local_rank` is the
    rank's number on its machine (in Paddle it repeats `rank`), and `device_type` is "cuda" or "cpu" (in Paddle
    "gpu"). `init_parallel_env` need not have run. If a process group exists, `rank` and `world_size` come from it.

    Attributes:
        rank: number of this process in the job, from 0.
        local_rank: its number on this machine, from 0.
        world_size: number of ranks in the job; 1 without a job.
        nranks: the same, Paddle's older name.
        device_id: index of its GPU among the visible ones; 0 on the CPU without a job.
        dev_id: the same, Paddle's older name.
        device_type: "cuda" or "cpu".
        trainer_endpoints: `host:port` of each rank, if Paddle's variables list them; else empty. dpfuse's
            launchers set them only as names that differ between ranks; nothing listens there.
        current_endpoint: this rank's `host:port`, or "".

    Raises:
        ValueError: the variables are incomplete or wrong.

    Example:
        >>> from dpfuse.job import ParallelEnv
        >>> env = ParallelEnv()
        >>> env.rank, env.world_size, env.device_id
        (0, 1, 0)
    """

    def __init__(self) -> None:
        job = read_environment()
        self.rank = get_rank()
        self.world_size = get_world_size()
        self.local_rank = self.rank if job is None else job.local_rank
        self.device_id = self.local_rank if job is None else job.device_id
        self.device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self.trainer_endpoints, self.current_endpoint = endpoints_of(os.environ, self.rank, self.world_size)
        self.nranks = self.world_size
        self.dev_id = self.device_id

    def __repr__(self) -> str:
        device = f"cuda:{self.device_id}" if self.device_type == "cuda" else "cpu"
        return (
            f"ParallelEnv(rank={self.rank}, local_rank={self.local_rank}, world_size={self.world_size}, "
            f"device={device!r})"
        )
