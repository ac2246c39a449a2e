"""The public names of `dpfuse.job`, under the name that torch and Paddle give to this part of a library."""

from dpfuse.job import ParallelEnv, SpawnContext, get_rank, get_world_size, init_parallel_env, spawn

__all__ = ["ParallelEnv", "SpawnContext", "get_rank", "get_world_size", "init_parallel_env", "spawn"]
