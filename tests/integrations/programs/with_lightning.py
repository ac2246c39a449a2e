"""Last batches of different sizes in Lightning's Trainer, against one process with all samples of each step."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import dpfuse
import dpfuse.integrations.lightning  # registers the strategy
from dpfuse.data import ResumableBatchSampler

sys.path.append(str(Path(__file__).parent))
from sentences import Bigrams, alone, difference, gathered, items, loss_of, sentences, together

RATE = 0.1


class Module(L.LightningModule):
    """Notes the samples of each step."""

    def __init__(self):
        super().__init__()
        self.net = Bigrams()
        self.steps = []

    def training_step(self, batch):
        self.steps.append(batch["number"].tolist())
        self.trainer.strategy.model.set_gradient_weight(items(batch["labels"]))
        return loss_of(self.net.scores(batch["input_ids"]), batch["labels"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE, momentum=0.9)


def main():
    dpfuse.init_parallel_env()
    size = dist.get_world_size()
    data = sentences(9 * size + 1)
    sampler = ResumableBatchSampler(data, 3)
    module = Module()
    start = alone(module.net, data, [], RATE)
    trainer = L.Trainer(
        strategy="dpfuse",
        accelerator="cpu",
        devices=size,
        max_epochs=2,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_sampler=sampler, collate_fn=together))
    steps = gathered(module.steps)
    first, second = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    for epoch in (first, second):
        assert sorted(number for step in epoch for number in step) == [*range(len(data))]
    assert first != second
    found = difference(module.net, alone(start, data, steps, RATE))
    assert found < 1e-12, found
    print(f"{found:.1e} after {len(steps)} steps\nfine")


if __name__ == "__main__":
    main()
