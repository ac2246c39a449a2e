"""Starting ranks and letting a process join its job: thin over torch.distributed and torchrun."""

from dpfuse.distributed.context import SpawnContext
from dpfuse.distributed.env import ParallelEnv, get_rank, get_world_size, init_parallel_env
from dpfuse.distributed.spawn import spawn

__all__ = ["ParallelEnv", "SpawnContext", "get_rank", "get_world_size", "init_parallel_env", "spawn"]
