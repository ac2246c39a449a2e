"""Joins the job, adds up over the ranks, and prints what it sees as one JSON line per rank."""

import sys

torch_came_first = "torch" in sys.modules

import json  # noqa: E402
import os  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import dpfuse.job as distributed  # noqa: E402

group = distributed.init_parallel_env()
assert group is not None
on_gpu = dist.get_backend() == "nccl"
value = torch.tensor(float(distributed.get_rank() + 1), device="cuda" if on_gpu else "cpu")
dist.all_reduce(value)
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") < os.environ.get("TEST_FAIL_UNTIL_RESTART", "0"):
    raise RuntimeError("planted: first attempt")
seen = {
    "rank": distributed.get_rank(),
    "sum": value.item(),
    "argv": sys.argv[1:],
    "name": __name__,
    "file": __file__,
    "path": sys.path[0],
    "torch_came_first": torch_came_first,
    "device": torch.cuda.current_device() if torch.cuda.is_available() else None,
    "backend": dist.get_backend(),
    "threads": torch.get_num_threads(),
    "environment": {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")},
    "paddle": {name: value for name, value in os.environ.items() if name.startswith(("PADDLE_", "FLAGS_"))},
}
# One write, so that the lines of two ranks do not mix.
sys.stdout.write(json.dumps(seen) + "\n")
