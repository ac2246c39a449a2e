"""Functions for spawn: in a module of their own, so that ranks need not import the tests."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import dpfuse.job as distributed
from tests.distributed.processes import family, listening_addresses


def add_up(scale: float) -> tuple[int, float, int]:
    distributed.init_parallel_env()
    value = torch.tensor(float(distributed.get_rank() + 1)) * scale
    dist.all_reduce(value)
    return distributed.get_rank(), value.item(), torch.get_num_threads()


def plain_torch() -> tuple[int, int, str | None]:
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_rank(), dist.get_world_size(), os.environ.get("GLOO_SOCKET_IFNAME")


def only_joins() -> int:
    faulthandler.dump_traceback_later(100, exit=True)  # once, one of them hung: let the next one say where
    distributed.init_parallel_env()
    return distributed.get_rank()


def large_result() -> torch.Tensor:
    return torch.full((1_000_000,), float(distributed.get_rank()))


def no_result() -> object:
    return lambda: None


def variable(name: str) -> str | None:
    return os.environ.get(name)


def paddle_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("PADDLE_", "FLAGS_"))}


def endpoints() -> tuple[str, list[str], int]:
    env = distributed.ParallelEnv()
    return env.current_endpoint, env.trainer_endpoints, env.world_size


def fails(how: str, folder: str) -> None:
    distributed.init_parallel_env()
    Path(folder, f"pid={os.getpid()}").touch()
    dist.barrier()
    if distributed.get_rank() == 1:
        if how in ("raise", "raise-while-peer-ignores-sigterm"):
            raise ValueError("planted")
        if how == "exit":
            sys.exit(5)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise-while-peer-ignores-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(120)
    dist.all_reduce(torch.zeros(1))


def sleeps(folder: str) -> None:
    Path(folder, f"pid={os.getpid()}").touch()
    time.sleep(120)


def addresses() -> list[str]:
    distributed.init_parallel_env()
    dist.all_reduce(torch.zeros(1))
    found = listening_addresses(family(os.getppid())) if distributed.get_rank() == 0 else []
    dist.barrier()
    return found


def in_a_job(function: Callable[..., object], *args: object) -> object:
    distributed.init_parallel_env()
    return function(distributed.get_rank(), distributed.get_world_size(), *args)


def ends(code: int) -> None:
    time.sleep(1)
    os._exit(code)


def fails_at_once() -> None:
    raise ValueError("planted")
