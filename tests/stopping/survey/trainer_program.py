"""As `program`, with the Trainer of transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import dpfuse
from dpfuse.integrations.transformers import StopTogether
from tests.stopping.survey.moments import MICRO_BATCHES, arm
from tests.stopping.survey.network import BATCH, EPOCHS, Samples, Unordered
from tests.stopping.survey.notes import Notes, hash_of
from tests.stopping.survey.trials import Trial, run_trial


class Items(Dataset[dict[str, Tensor]]):
    """The samples by name, as the Trainer wants them.

    Args:
        count: how many of them.
    """

    def __init__(self, count: int) -> None:
        self._samples, self._count = Samples(), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(zip(("index", "inputs"), map(torch.as_tensor, self._samples[index]), strict=True))


class Model(nn.Module):
    """Notes the samples of each batch.

    Args:
        notes: of this rank.
    """

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.net = Unordered(dropout=0.0)
        self.notes = notes
        self.state: Any = None  # of the Trainer
        self.epoch, self.trained = 0, []

    def forward(self, index: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss, as the Trainer wants it."""
        if self.training:
            self.epoch = int(self.state.epoch)
            self.trained += index.tolist()
        outputs = self.net(inputs)
        return {"loss": outputs.square().mean(), "logits": outputs}


class Begin(TrainerCallback):
    """Arms the moment once the handlers are installed, and notes what is saved.

    Args:
        model: of the Trainer.
        trial: whose signal is to come; None for none.
        folder: of the trial.
    """

    def __init__(self, model: Model, trial: Trial | None, folder: Path) -> None:
        self.model, self.trial, self.folder = model, trial, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As the callback of the Trainer."""
        self.model.state = state
        if self.trial is not None:
            arm(self.trial, self.model.net, self.folder)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the samples of a step that is made. Those of a window that is left would be missing."""
        self.model.notes.write(epoch=self.model.epoch, samples=self.model.trained)
        self.model.trained = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As the callback of the Trainer."""
        self.model.notes.write(saved=state.global_step)


def main(folder: Path, part: str, kind: str, workers: int, trial: Trial | None) -> None:
    """Train."""
    dpfuse.init_parallel_env()
    notes = Notes(folder, part)
    model = Model(notes)
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=MICRO_BATCHES,
        dataloader_num_workers=workers,
        num_train_epochs=EPOCHS,
        learning_rate=0.01,
        remove_unused_columns=False,
        save_strategy="epoch",
        eval_strategy="epoch",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Items(len(Samples())), eval_dataset=Items(BATCH))
    stop = StopTogether(trainer)
    trainer.add_callback(stop)
    trainer.add_callback(Begin(model, trial, folder))
    with dpfuse.patch(deterministic=True):
        trainer.train(resume_from_checkpoint=part == "rest")
    if stop.stopped:
        notes.write(stopped=trainer.state.global_step, reason=str(trainer.model_wrapped.stop_reason))
    else:
        notes.write(done=trainer.state.global_step, weights=hash_of(model.net))


if __name__ == "__main__":
    run_trial(main)
