"""Lightning's Trainer and Fabric with a sharded optimizer, which is made of the model that they have wrapped.

    python -m dpfuse.launch --nproc_per_node 2 examples/adoption/with_sharded_lightning.py

The lines are [1] to [3] for the Trainer, and [4] to [6] for Fabric. Both accumulate, clip, and save a checkpoint. Both
also run with `strategy="ddp"` and the plain optimizer. Without clipping all bits must be equal. The last digit of a
norm depends on the order of its sum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import digits
import lightning as L
import torch
import torch.nn.functional as F
from checklist import Checklist, same_bits
from lightning.fabric import Fabric
from scratch import shared_folder
from torch import Tensor
from torch.utils.data import DataLoader

import dpfuse
import dpfuse.integrations.lightning  # [1] this registers the name

ACCUMULATE = 2
CLIP = 0.5  # largest norm of the gradients
SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def loader() -> DataLoader[Any]:
    return DataLoader(digits.dataset(), batch_size=32)


class Module(L.LightningModule):
    """Lightning wraps it before it asks for the optimizer."""

    def __init__(self, *, sharded: bool) -> None:
        super().__init__()
        self.network, self.sharded = digits.network(), sharded
        self.losses: list[Tensor] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.sharded:
            return dpfuse.ShardedOptimizer(self.trainer.strategy.model, torch.optim.AdamW, **SETTINGS)  # [2]
        return torch.optim.AdamW(self.parameters(), **SETTINGS)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, labels = batch
        loss = F.cross_entropy(self.network(pictures), labels)
        self.losses.append(loss.detach())
        return loss

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None, gradient_clip_algorithm: str | None
    ) -> None:
        if self.sharded and gradient_clip_val is not None:
            self.trainer.strategy.model.clip_grad_norm_(gradient_clip_val)  # [3]
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def train(folder: Path, *, sharded: bool, clip: float | None, epochs: int = 1, resume: Path | None = None) -> Module:
    """Train with a Trainer, and save a checkpoint as `folder/EPOCHS.ckpt`."""
    module = Module(sharded=sharded)
    trainer = L.Trainer(
        strategy="dpfuse" if sharded else "ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), ckpt_path=resume)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    return module


def train_with_fabric(path: Path, *, sharded: bool, clip: float | None) -> list[Tensor]:
    """Train with Fabric. Return losses, and the optimizer's states from the checkpoint that it has saved."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="dpfuse" if sharded else "ddp")
    fabric.launch()
    model = fabric.setup_module(digits.network())  # [4] the model alone
    if sharded:
        wrapped = model._forward_module  # Fabric's module does not give its wrapper to programs
        optimizer = fabric.setup_optimizers(dpfuse.ShardedOptimizer(wrapped, torch.optim.AdamW, **SETTINGS))  # [5]
    else:
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), **SETTINGS))
    losses = []
    for number, (pictures, labels) in enumerate(fabric.setup_dataloaders(loader()), start=1):
        with fabric.no_backward_sync(model, enabled=number % ACCUMULATE > 0):
            loss = F.cross_entropy(model(pictures), labels)
            fabric.backward(loss / ACCUMULATE)
        losses.append(loss.detach())
        if number % ACCUMULATE == 0:
            if clip is not None and sharded:
                wrapped.clip_grad_norm_(clip)  # [6]
            elif clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(path, {"model": model, "optimizer": optimizer})
    states = torch.load(path)["optimizer"]["state"]
    return [*losses, *(value for state in states.values() for value in state.values())]


def main() -> None:
    dpfuse.init_parallel_env()
    checklist = Checklist()
    with shared_folder() as folder:
        plain, sharded = (train(folder, sharded=sharded, clip=None) for sharded in (False, True))
        same = same_bits([*sharded.losses, *sharded.parameters()], [*plain.losses, *plain.parameters()])
        checklist.check(f"Trainer: {len(sharded.losses)} losses and the weights equal those of DDP and AdamW", same)
        plain, sharded = (train(folder, sharded=sharded, clip=CLIP) for sharded in (False, True))
        close = torch.allclose(torch.stack(sharded.losses), torch.stack(plain.losses))
        checklist.check("Trainer: clipped, the losses are close to them", close)
        resumed = train(folder, sharded=True, clip=CLIP, epochs=2, resume=folder / "1.ckpt")
        straight = train(folder, sharded=True, clip=CLIP, epochs=2)
        same = same_bits(resumed.losses, straight.losses[len(sharded.losses) :])
        checklist.check("Trainer: a checkpoint resumes with the same bits", same)

        plain, sharded = (train_with_fabric(folder / "fabric.ckpt", sharded=kind, clip=None) for kind in (False, True))
        checklist.check(
            "Fabric: losses and the optimizer's states equal those of DDP and AdamW", same_bits(sharded, plain)
        )
        plain, sharded = (train_with_fabric(folder / "fabric.ckpt", sharded=kind, clip=CLIP) for kind in (False, True))
        close = all(map(torch.allclose, sharded, plain))
        checklist.check("Fabric: clipped, they are close to them", close)
    checklist.end()


if __name__ == "__main__":
    main()
