"""Start the ranks of a job, end them together, and let a process join its job.

torchrun starts, restarts and watches the ranks of `launch`, and torch.multiprocessing those of `spawn`. Ours is what
these two lack: Paddle's flags and variables, sockets on loopback alone for one machine, an error that names the rank
that failed first, signals that reach the ranks, and an end within seconds, also for what ranks have started. For the
last two, `shutdown` and `meeting` replace methods of torchrun that are not public.

Read in this order: `env` (a process joins its job) with `read_environment` (a rank's variables); `launcher` (starts
and ends ranks) with `paddle_launch_flags` (the command line), `nodes`, `interfaces`, `rendezvous`, `signals`,
`shutdown`, `meeting`, `stopped` and `logs`; `spawn` (one function on several ranks) with `spawn_context`. All of them
use `rank_program` (what runs in a rank around the user's program), `failure` (which rank failed first), `devices`
(backends, GPUs, cores) and `descendants` (processes that ranks have started).
"""

from dpfuse.job.env import ParallelEnv, get_rank, get_world_size, init_parallel_env
from dpfuse.job.spawn import spawn
from dpfuse.job.spawn_context import SpawnContext

__all__ = ["ParallelEnv", "SpawnContext", "get_rank", "get_world_size", "init_parallel_env", "spawn"]
