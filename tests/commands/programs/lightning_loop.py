"""A Lightning module under Lightning's trainer, which starts the second rank as a process of its own."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from weights import show


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2))

    def training_step(self, batch, _):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    lightning.seed_everything(4)
    module = Module()
    data = DataLoader(TensorDataset(torch.randn(40, 5), torch.randint(2, (40,))), batch_size=2)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=int(sys.argv[1]), accumulate_grad_batches=2, **quiet
    )
    trainer.fit(module, data)
    show(module)


if __name__ == "__main__":
    main()
