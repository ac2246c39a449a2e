"""The four usages of spawn in Paddle's documents; prints what the ranks of each returned."""

import json
import os

import torch
import torch.distributed

import dpfuse.paddle.distributed as dist


def train(print_result=False):
    dist.init_parallel_env()
    total = torch.tensor(float(dist.get_rank() + 1))
    torch.distributed.all_reduce(total)
    if print_result and dist.get_rank() == 0:
        print("total", total.item(), flush=True)
    return dist.get_rank(), dist.get_world_size(), total.item(), os.environ.get("CUDA_VISIBLE_DEVICES")


if __name__ == "__main__":
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, list(cores)[:1])  # without a number there are as many ranks as cores: one here
    contexts = [dist.spawn(train), dist.spawn(train, args=(True,))]
    os.sched_setaffinity(0, cores)
    contexts += [dist.spawn(train, args=(True,), nprocs=2), dist.spawn(train, args=(True,), nprocs=2, gpus="4,5")]
    print(json.dumps([[queue.get() for queue in context.return_queues] for context in contexts]))
