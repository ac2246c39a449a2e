"""Fabric: import `dpfuse.integrations.lightning`, then use `Fabric(strategy="dpfuse")`.

    python -m dpfuse.launch --nproc_per_node 2 examples/adoption/with_fabric.py

The lines are [1] and [2]. A Fabric program that accumulates with `no_backward_sync` also runs with `strategy="ddp"`.
Losses, weights and the saved state must be equal bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import digits
import torch
import torch.nn.functional as F
from checklist import Checklist, same_bits
from lightning.fabric import Fabric
from scratch import shared_folder
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpfuse
import dpfuse.integrations.lightning  # [1] this registers the name

ACCUMULATE = 2


def train(strategy: str, folder: Path) -> tuple[type, list[Tensor], dict[str, Tensor]]:
    """Train an epoch. Return the type of the wrapper, losses, and the weights from a checkpoint."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)  # [2] "dpfuse"
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    network = digits.network()
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(digits.dataset(), batch_size=32, shuffle=True))
    losses = []
    for number, (pictures, labels) in enumerate(loader, start=1):
        with fabric.no_backward_sync(model, enabled=number % ACCUMULATE > 0):
            loss = F.cross_entropy(model(pictures), labels)
            fabric.backward(loss / ACCUMULATE)
        losses.append(loss.detach())
        if number % ACCUMULATE == 0:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    path = folder / f"{strategy}.ckpt"
    fabric.save(path, {"model": model})
    again = {"model": fabric.setup_module(digits.network())}
    fabric.load(path, again)
    assert same_bits(again["model"].parameters(), model.parameters())
    return type(model._forward_module), losses, torch.load(path)["model"]


def main() -> None:
    dpfuse.init_parallel_env()
    checklist = Checklist()
    with shared_folder() as folder:
        wrapper, losses, state = train("dpfuse", folder)
        torchs, expected, torchs_state = train("ddp", folder)
    assert (wrapper, torchs) == (dpfuse.DistributedDataParallel, nn.parallel.DistributedDataParallel)
    checklist.check(f"{len(losses)} losses equal DDP's bitwise", same_bits(losses, expected))
    same = list(state) == list(torchs_state) and same_bits(state.values(), torchs_state.values())
    checklist.check("the saved weights equal DDP's bitwise, under the same keys", same)
    checklist.end()


if __name__ == "__main__":
    main()
