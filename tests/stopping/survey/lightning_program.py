"""As `program`, with the Trainer of Lightning. It keeps no random states, so the network has no dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import dpfuse
from dpfuse.data import ResumableBatchSampler
from dpfuse.integrations.lightning import DPFuseStrategy, StopTogether
from tests.stopping.survey.moments import MICRO_BATCHES, arm
from tests.stopping.survey.network import BATCH, EPOCHS, LENGTH, Samples, Unordered
from tests.stopping.survey.notes import Notes, hash_of
from tests.stopping.survey.trials import Trial, run_trial


class Module(pl.LightningModule):
    """Notes the samples of each batch.

    Args:
        notes: of this rank.
        trial: whose signal is to come; None for none.
        folder: of the trial.
    """

    def __init__(self, notes: Notes, trial: Trial | None, folder: Path) -> None:
        super().__init__()
        self.net = Unordered(dropout=0.0)
        self.notes, self.trial, self.folder = notes, trial, folder
        self.stepped, self.trained = 0, []

    def on_train_start(self) -> None:
        """Arm the moment, once the handlers are installed."""
        self.stepped = self.trainer.global_step
        self.wrapper = (self.trainer.strategy.model,)  # in a tuple it is no module of this one
        if self.trial is not None:
            arm(self.trial, self.net, self.folder)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss."""
        indices, inputs = batch
        self.trained += indices.tolist()
        return self.net(inputs).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the samples of a step that is made. Those of a window that is left would be missing."""
        if self.trainer.global_step > self.stepped:
            self.notes.write(epoch=self.current_epoch, samples=self.trained)
            self.stepped, self.trained = self.trainer.global_step, []

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Evaluate."""
        self.net(batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Trainer(pl.Trainer):
    """Notes what is saved."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's."""
        super().save_checkpoint(*args, **kwargs)
        self.lightning_module.notes.write(saved=self.global_step)


def main(folder: Path, part: str, kind: str, workers: int, trial: Trial | None) -> None:
    """Train."""
    dpfuse.init_parallel_env()
    notes = Notes(folder, part)
    module = Module(notes, trial, folder)
    sampler = ResumableBatchSampler(range(LENGTH), BATCH, seed=1)
    loader = DataLoader(Samples(), batch_sampler=sampler, num_workers=workers)
    path = folder / "checkpoints" / "stopped.ckpt"
    stop = StopTogether(path)
    trainer = Trainer(
        strategy=DPFuseStrategy(deterministic=True),
        accelerator="cpu",
        devices=dpfuse.get_world_size(),
        max_epochs=EPOCHS,
        accumulate_grad_batches=MICRO_BATCHES,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[stop, pl.callbacks.ModelCheckpoint(folder / "others")],
    )
    held = DataLoader(torch.utils.data.Subset(Samples(), range(BATCH)), BATCH)
    trainer.fit(module, loader, held, ckpt_path=path if part == "rest" else None)
    if stop.stopped:
        notes.write(stopped=trainer.global_step, reason=str(module.wrapper[0].stop_reason))
    else:
        notes.write(done=trainer.global_step, weights=hash_of(module.net))


if __name__ == "__main__":
    run_trial(main)
