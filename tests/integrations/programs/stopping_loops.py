"""A signal to the last rank ends a loop with accelerate, or with Fabric, on all ranks in the same step.

Arguments: "accelerate" or "fabric", and a folder.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import dpfuse
from dpfuse.data import ResumableBatchSampler

sys.path.append(str(Path(__file__).parent))
from sentences import Bigrams, items, loss_of, sentences, together

FOLDER = Path(sys.argv[2])
STEPS, ACCUMULATE = 6, 2  # of the training
SENT = 2  # the first batch of the second window


def made():
    net = Bigrams()
    net.forward = net.scores
    data = sentences(4 * STEPS * ACCUMULATE * dist.get_world_size())
    sampler = ResumableBatchSampler(data, 4)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=together)
    return net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), sampler, loader


def send():
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGUSR1)


def with_accelerate(disturbed, folder):
    """Train, from the checkpoint if there is one. Return the steps, and the weights."""
    from dpfuse.integrations.accelerate import DPFuseAccelerator

    accelerator = DPFuseAccelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    net, optimizer, sampler, loader = made()
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    accelerator.register_for_checkpointing(sampler)
    if folder.exists():
        accelerator.load_state(str(folder))
    steps = 0
    for number, batch in enumerate(sampler.track(loader)):
        if disturbed and number == SENT:
            send()
        with accelerator.accumulate(model):
            loss = loss_of(model(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss, num_items=items(batch["labels"]))
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
        if model.stop_requested:
            accelerator.save_state(str(folder))
            break
    return steps, net


def with_fabric(disturbed, folder):
    """Train, from the checkpoint if there is one. Return the steps, and the weights."""
    from lightning.fabric import Fabric

    from dpfuse.integrations.lightning import DPFuseFabricStrategy

    fabric = Fabric(strategy=DPFuseFabricStrategy(), accelerator="cpu", devices=dist.get_world_size())
    fabric.launch()
    net, optimizer, sampler, loader = made()
    model, optimizer = fabric.setup(net, optimizer)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    if folder.exists():
        fabric.load(folder / "stopped.ckpt", state)
    steps = 0
    for number, batch in enumerate(sampler.track(loader), start=1):
        if disturbed and number == SENT + 1:
            send()
        with fabric.no_backward_sync(model, enabled=number % ACCUMULATE > 0):
            fabric.backward(loss_of(model(batch["input_ids"]), batch["labels"]))
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        if fabric.strategy.model.stop_requested:
            fabric.save(folder / "stopped.ckpt", state)
            break
    return steps, net


def main():
    dpfuse.init_parallel_env()
    train = {"accelerate": with_accelerate, "fabric": with_fabric}[sys.argv[1]]
    steps, undisturbed = train(False, FOLDER / "none")
    assert steps == STEPS
    with dpfuse.stop_on_signals("SIGUSR1"):
        steps, _ = train(True, FOLDER / "stopped")
    dpfuse.forget_stop()
    dist.barrier()  # rank 0 saves
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, steps)
    assert parts == [SENT // ACCUMULATE + 1] * dist.get_world_size(), parts
    rest, net = train(False, FOLDER / "stopped")
    assert steps + rest == STEPS
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), undisturbed.parameters(), strict=True))
    print("fine")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
