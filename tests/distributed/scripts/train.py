"""What Paddle's documents launch: joins the job if there is one, adds up over the ranks, prints one JSON line."""

import json
import os
import sys

import torch
import torch.distributed

import dpfuse.paddle.distributed as dist

group = dist.init_parallel_env()
env = dist.ParallelEnv()
total = torch.tensor(float(env.rank + 1))
if group is not None:
    total = total.to(env.device_type)
    torch.distributed.all_reduce(total)
seen = {
    "rank": env.rank,
    "world_size": env.world_size,
    "sum": total.item(),
    "endpoint": env.current_endpoint,
    "endpoints": env.trainer_endpoints,
    "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    "paddle": {name: value for name, value in os.environ.items() if name.startswith(("PADDLE_", "FLAGS_"))},
}
# One write, so that the lines of two ranks do not mix.
sys.stdout.write(json.dumps(seen) + "\n")
