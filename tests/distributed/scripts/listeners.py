"""Prints on which addresses the launcher and its ranks listen while a job runs (rank 0 only)."""

import json
import os

import torch
import torch.distributed as dist

import dpfuse.job as distributed
from tests.distributed.processes import family, listening_addresses

distributed.init_parallel_env()
dist.all_reduce(torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu"))
if distributed.get_rank() == 0:
    print(json.dumps(listening_addresses(family(os.getppid()))))
dist.barrier()
