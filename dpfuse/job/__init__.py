"""Starting ranks and letting a process join its job: thin over torch.distributed and torchrun."""

from dpfuse.job.env import ParallelEnv, get_rank, get_world_size, init_parallel_env
from dpfuse.job.spawn import spawn
from dpfuse.job.spawn_context import SpawnContext

__all__ = ["ParallelEnv", "SpawnContext", "get_rank", "get_world_size", "init_parallel_env", "spawn"]
