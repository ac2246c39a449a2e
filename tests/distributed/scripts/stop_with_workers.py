"""A rank whose loader has two workers. It trains until the ranks stop together, prints where, and may save.

Arguments: how the workers start, and a folder for the checkpoint. If the method is "forkserver", the rank also begins
and ends a process of its own with it.
"""

import multiprocessing
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import dpfuse


def main(method: str, folder: str) -> None:
    dpfuse.stop_on_signals()
    if "RANK" in os.environ:
        dpfuse.init_parallel_env()
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    model = dpfuse.DataParallel(torch.nn.Linear(1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = iter(DataLoader(torch.zeros(100_000, 1), batch_size=4, num_workers=2, multiprocessing_context=method))
    for step, batch in enumerate(batches):
        model(batch).square().sum().backward()
        optimizer.step()
        if model.stop_requested:
            break
        if step == 2:
            pids = [os.getpid(), *(worker.pid for worker in batches._workers)]
            sys.stdout.write("".join(f"pid={pid}\n" for pid in pids))
            sys.stdout.flush()
        time.sleep(0.01)
    dpfuse.save_checkpoint(folder, model, optimizer, step=step)
    print(f"rank {dist.get_rank()} stopped in step {step}: {model.stop_reason}", flush=True)
    if method == "forkserver":
        own = multiprocessing.get_context(method).Process(target=time.sleep, args=(600,))
        own.start()
        own.terminate()
        own.join()
        print(f"own process ended by {-own.exitcode}")


if __name__ == "__main__":
    main(*sys.argv[1:])
