"""The ranks of a job under fleet's names. Every rank is a worker; there are no servers."""

from __future__ import annotations

from dpfuse import DPFuseError, ParallelEnv, get_rank, get_world_size
from dpfuse.arguments import flag
from dpfuse.paddle.collectives import any_rank, world_size

__all__ = [
    "barrier_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "server_num",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]


def worker_index() -> int:
    """Return this process's rank."""
    return get_rank()


def worker_num() -> int:
    """Return the number of ranks."""
    return get_world_size()


def is_first_worker() -> bool:
    """Whether this is rank 0."""
    return worker_index() == 0


def is_worker() -> bool:
    """Return True: every process trains."""
    return True


def is_server() -> bool:
    """Return False: there is no parameter-server mode."""
    return False


def server_num() -> int:
    """Return 0: there is no parameter-server mode."""
    return 0


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """Return the ranks' addresses from the environment.

    Args:
        to_string: True joins them with commas.

    Returns:
        `host:port` by rank; empty if the environment has none.
    """
    endpoints = ParallelEnv().trainer_endpoints
    return ",".join(endpoints) if flag("to_string", to_string) else endpoints


def barrier_worker() -> None:
    """Wait for all ranks. On a single process, return at once.

    Raises:
        DPFuseError: The environment announces several ranks, and there is no process group yet.
    """
    if worker_num() > 1 and world_size() == 1:
        raise DPFuseError(
            f"barrier_worker found no process group, but the environment announces {worker_num()} ranks; call "
            "fleet.init(is_collective=True) first"
        )
    any_rank(False)
