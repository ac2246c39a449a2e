"""`paddle.distributed`: joins a job, starts ranks, and holds fleet.

All but `fleet` is dpfuse's own code under Paddle's names. `launch` is Paddle's path of the launcher.
"""

from importlib import import_module
from types import ModuleType

from dpfuse.distributed import ParallelEnv, get_rank, get_world_size, init_parallel_env, spawn
from dpfuse.paddle.counterparts import lacks
from dpfuse.paddle.distributed import fleet

__all__ = ["ParallelEnv", "fleet", "get_rank", "get_world_size", "init_parallel_env", "spawn"]

_missing = lacks(__name__)


def __getattr__(name: str) -> ModuleType:
    # Import on demand: `python -m dpfuse.paddle.distributed.launch` warns if the module is already imported.
    if name == "launch":
        return import_module("dpfuse.paddle.distributed.launch")
    return _missing(name)
