"""Means over all tokens through `backward(loss, num_items=…)`, against one process with all tokens."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import DataLoaderConfiguration
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

import dpfuse
from dpfuse.data import ResumableBatchSampler
from dpfuse.integrations.accelerate import DPFuseAccelerator

sys.path.append(str(Path(__file__).parent))
from sentences import Bigrams, alone, difference, gathered, items, loss_of, sentences, together

RATE = 0.1


def train(accumulate, reduction, samples, batch_size, join):
    """Train two epochs; return the difference to one process with all tokens, the steps, and the sizes of batches."""
    # Where some ranks have one batch less, accelerate would repeat one.
    loading = DataLoaderConfiguration(even_batches=False)
    accelerator = DPFuseAccelerator(cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=loading)
    data, net = sentences(samples), Bigrams()
    start = alone(net, data, [], RATE)
    # The optimizer of a rank without input takes no step, so it must have no state that is older then.
    momentum = 0.0 if join else 0.9
    sampler = ResumableBatchSampler(data, batch_size, drop_last=False)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=together)
    # A forward of the wrapper is what synchronises.
    net.forward = net.scores
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), RATE, momentum=momentum), loader
    )
    assert isinstance(model, dpfuse.DistributedDataParallel)
    steps, sizes = [[]], set()
    for _ in range(2):
        with Join([model], enable=True) if join else nullcontext():
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
        if join and len(steps) % -(-samples // accelerator.num_processes) != 1:
            steps.insert(-1, [])  # a step of other ranks
    of_all = gathered(steps[:-1])
    assert sorted(number for step in of_all for number in step) == sorted([*range(samples)] * 2)
    return difference(net, alone(start, data, of_all, RATE, momentum)), len(of_all), sizes


def main():
    dpfuse.init_parallel_env()
    size = dist.get_world_size()
    cases = {
        "one batch": (1, "mean", 23, 3, False),
        "windows": (2, "mean", 23, 3, False),
        "windows of sums": (3, "sum", 29, 2, False),
    }
    if size > 1:
        cases["joined"] = (1, "mean", 3 * size + 1, 1, True)
    for name, case in cases.items():
        found, steps, sizes = train(*case)
        if dist.get_rank() == 0:
            print(f"{name}: {found:.1e} after {steps} steps with batches of {sorted(sizes)}")
        assert found < 1e-12, (name, found)
    print("fine")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
