"""Start the ranks of a job, and let a process join its job: a thin layer over torch.distributed and torchrun.

Read in this order: `env` (a process joins its job) with `read_environment` (a rank's variables); `launcher` (starts
and ends ranks) with `paddle_launch_flags` (the command line), `nodes`, `interfaces`, `rendezvous`, `shutdown` and
`logs`; `spawn` (one function on several ranks) with `spawn_context`. All of them use `rank_program` (what runs in a
rank around the user's program), `failure` (which rank failed first), `devices` (backends, GPUs, cores) and
`descendants` (processes that ranks have started).
"""

from dpfuse.job.env import ParallelEnv, get_rank, get_world_size, init_parallel_env
from dpfuse.job.spawn import spawn
from dpfuse.job.spawn_context import SpawnContext

__all__ = ["ParallelEnv", "SpawnContext", "get_rank", "get_world_size", "init_parallel_env", "spawn"]
