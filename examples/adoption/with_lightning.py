"""Lightning: import `dpfuse.integrations.lightning`, then use `Trainer(strategy="dpfuse")`.

    python -m dpfuse.launch --nproc_per_node 2 examples/adoption/with_lightning.py

The lines are [1] and [2]. Automatic optimisation with `accumulate_grad_batches`, and manual optimisation, also run with
`strategy="ddp"`. Losses and weights must be equal bit for bit, and the checkpoints must have the same keys.
"""

from __future__ import annotations

from pathlib import Path

import digits
import lightning as L
import torch
import torch.nn.functional as F
from checklist import Checklist, same_bits, state_of
from scratch import shared_folder
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpfuse
import dpfuse.integrations.lightning  # [1] this registers the name

ACCUMULATE = 2


class Automatic(L.LightningModule):
    """Lightning runs backward and the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.network = digits.network()
        self.losses: list[Tensor] = []
        self.wrapper: type | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, labels = batch
        loss = F.cross_entropy(self.network(pictures), labels)
        self.losses.append(loss.detach())
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor | None:
        return self.loss(batch)

    def on_train_start(self) -> None:
        self.wrapper = type(self.trainer.strategy.model)


class Manual(Automatic):
    """The module runs backward and the optimizer itself, and steps every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.manual_backward(self.loss(batch) / ACCUMULATE)
        if len(self.losses) % ACCUMULATE == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def train(kind: type[Automatic], strategy: str, folder: Path) -> tuple[Automatic, list[str]]:
    """Train two epochs. Return the trained module, and the keys of its checkpoint."""
    L.seed_everything(0, verbose=False)
    module = kind()
    trainer = L.Trainer(
        strategy=strategy,  # [2] "dpfuse"
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=1 if kind is Manual else ACCUMULATE,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(digits.dataset(), batch_size=32, shuffle=True))
    path = folder / f"{strategy}.ckpt"
    trainer.save_checkpoint(path)
    return module, list(torch.load(path, weights_only=False)["state_dict"])


def main() -> None:
    dpfuse.init_parallel_env()
    checklist = Checklist()
    wrappers = {"dpfuse": dpfuse.DistributedDataParallel, "ddp": nn.parallel.DistributedDataParallel}
    with shared_folder() as folder:
        for kind in (Automatic, Manual):
            results, keys = [], []
            for strategy, wrapper in wrappers.items():
                module, saved = train(kind, strategy, folder)
                assert module.wrapper is wrapper
                results.append([*module.losses, *state_of(module)])
                keys.append(saved)
            name = f"{kind.__name__.lower()} optimisation"
            steps = len(module.losses)
            checklist.check(f"{name}: {steps} losses and the weights equal DDP's bitwise", same_bits(*results))
            checklist.check(f"{name}: the checkpoint has DDP's keys", keys[0] == keys[1] != [])
    checklist.end()


if __name__ == "__main__":
    main()
