"""Means over all tokens through `DPFuseAccelerator.backward(loss, num_items=…)`, against one process with all tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

import dpfuse
from dpfuse.data import ResumableBatchSampler
from dpfuse.integrations.accelerate import DPFuseAccelerator

sys.path.append(str(Path(__file__).parent))
from sentences import Bigrams, alone, difference, gathered, items, loss_of, sentences, together

RATE = 0.1


def train(accelerate, reduction, samples, batch_size, join):
    """Train two epochs; return the difference to one process with all tokens, that to means of means, and the steps."""
    accelerator = DPFuseAccelerator(cpu=True, gradient_accumulation_steps=accelerate)
    data, net = sentences(samples), Bigrams()
    start = alone(net, data, [], RATE)
    sampler = ResumableBatchSampler(data, batch_size, drop_last=False)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=together)
    # A forward of the wrapper is what synchronises.
    net.forward = net.scores
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), RATE, momentum=0.9), loader)
    assert isinstance(model, dpfuse.DistributedDataParallel) == (accelerator.num_processes > 1)
    steps, sizes = [[]], set()
    for _ in range(2):
        with Join([model], enable=join) if accelerator.num_processes > 1 else accelerator.autocast():
            for batch in sampler.track(loader):
                with accelerator.accumulate(model):
                    steps[-1] += batch["number"].tolist()
                    sizes.add(len(batch["number"]))
                    loss = loss_of(model(batch["input_ids"]), batch["labels"], reduction)
                    accelerator.backward(loss, num_items=items(batch["labels"]), reduction=reduction)
                    optimizer.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        steps.append([])
        if join and len(steps) % sampler_steps(samples, accelerator.num_processes) != 1:
            steps.insert(-1, [])  # a step of other ranks
    together_ = gathered(steps[:-1])
    assert sorted(number for step in together_ for number in step) == sorted([*range(samples)] * 2)
    return difference(net, alone(start, data, together_, RATE)), len(together_), sizes


def sampler_steps(samples, size):
    return -(-samples // size)


def main():
    dpfuse.init_parallel_env()
    cases = {
        "one batch": (1, "mean", 23, 3, False),
        "windows": (2, "mean", 23, 3, False),
        "windows of sums": (3, "sum", 29, 2, False),
        "joined": (1, "mean", 10 if dist.get_world_size() == 3 else 9, 1, True),
    }
    for name, case in cases.items():
        found, steps, sizes = train(*case)
        if dist.get_rank() == 0:
            print(f"{name}: {found:.1e} after {steps} steps with batches of {sorted(sizes)}")
        assert found < 1e-12, (name, found)
    print("fine")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
