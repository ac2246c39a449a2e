"""`paddle.distributed`: joining a job, starting ranks, fleet."""

from importlib import import_module
from types import ModuleType

from dpfuse.distributed import ParallelEnv, get_rank, get_world_size, init_parallel_env, spawn
from dpfuse.paddle.distributed import fleet

__all__ = ["ParallelEnv", "fleet", "get_rank", "get_world_size", "init_parallel_env", "spawn"]


def __getattr__(name: str) -> ModuleType:
    # Imported on demand: `python -m dpfuse.paddle.distributed.launch` would complain of a module that is there already.
    if name == "launch":
        return import_module("dpfuse.paddle.distributed.launch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
