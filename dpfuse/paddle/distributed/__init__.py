"""`paddle.distributed`: joining a job, starting ranks, fleet."""

from dpfuse.distributed import ParallelEnv, get_rank, get_world_size, init_parallel_env, spawn

__all__ = ["ParallelEnv", "get_rank", "get_world_size", "init_parallel_env", "spawn"]
