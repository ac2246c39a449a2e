"""Starting ranks and letting a process join its job: thin over torch.distributed and torchrun."""

from dpfuse.job.context import SpawnContext
from dpfuse.job.env import ParallelEnv, get_rank, get_world_size, init_parallel_env
from dpfuse.job.spawn import spawn

__all__ = ["ParallelEnv", "SpawnContext", "get_rank", "get_world_size", "init_parallel_env", "spawn"]
