"""Means over all tokens through `DPFuseTrainer`, against one process with all tokens. `Trainer` itself differs."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

import dpfuse
from dpfuse.integrations.transformers import DPFuseTrainer

sys.path.append(str(Path(__file__).parent))
from sentences import Bigrams, alone, difference, gathered, loss_of, sentences, together

RATE = 0.1


class Counting(Bigrams):
    """Takes the number of items, as models of transformers do; notes the samples of each step, with their epoch."""

    def forward(self, input_ids, labels, number, num_items_in_batch=None, **kwargs):
        self.steps[-1] += [(self.epoch, each) for each in number.tolist()]
        scores = self.scores(input_ids)
        if num_items_in_batch is None:
            return {"loss": loss_of(scores, labels)}
        return {"loss": loss_of(scores, labels, "sum") / num_items_in_batch}


class Mean(Bigrams):
    """Returns the mean over its own batch, as models of a user do."""

    def forward(self, input_ids, labels, number):
        self.steps[-1] += [(self.epoch, each) for each in number.tolist()]
        return {"loss": loss_of(self.scores(input_ids), labels)}


class Notes(TrainerCallback):
    """Where steps and epochs end."""

    def __init__(self, model):
        self.model = model

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.model.epoch += 1

    def on_step_end(self, args, state, control, **kwargs):
        self.model.steps.append([])


def trainer_of(kind, trainer_class, data, batch_size, accumulate, folder, collator, saving, **more):
    """The model, and a Trainer of two epochs, which saves each step or none."""
    model = kind()
    model.steps, model.epoch = [[]], -1
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=2,
        max_grad_norm=0,
        remove_unused_columns=False,
        save_strategy="steps" if saving else "no",
        save_steps=1,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return model, trainer_class(
        model=model,
        args=arguments,
        train_dataset=data,
        data_collator=collator,
        optimizers=(optimizer, constant),
        callbacks=[Notes(model)],
        **more,
    )


def train(kind, trainer_class, samples, *how, folder, data=None, collator=together, resumed=False, **more):
    """Train two epochs; return the difference to one process with all tokens, and how many steps there were.

    Args:
        samples: of an epoch; all of `data`, or what a sampler takes.
        resumed: whether another Trainer has trained the first step.
    """
    data = sentences(samples) if data is None else data
    model, trainer = trainer_of(kind, trainer_class, data, *how, folder, collator, resumed, **more)
    start = alone(model, [], [], RATE)
    with contextlib.nullcontext() if trainer_class is not Trainer else dpfuse.patch():
        trainer.train()
    # accelerate repeats samples at the end of an epoch: only the first time counts.
    seen, steps = set(), []
    for step in gathered(model.steps[:-1]):
        new = [*dict.fromkeys(each for each in step if each not in seen)]
        seen.update(new)
        steps.append([number for _, number in new])
    assert [sum(epoch == each for each, _ in seen) for epoch in range(2)] == [samples] * 2, seen
    if resumed:
        model, trainer = trainer_of(kind, trainer_class, data, *how, folder, collator, resumed, **more)
        dist.barrier()  # rank 0 saves
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
        assert len(model.steps[:-1]) == len(steps) - 1
    return difference(model, alone(start, data, steps, RATE)), len(steps)


def main():
    dpfuse.init_parallel_env()
    size = dist.get_world_size()
    cases = {
        "a count, the last batch not full": (Counting, 8 * size + 5, 3, 2),
        "a count, no sample for the last rank in a window": (Counting, 9 * size + 1, 3, 2),
        "a count, no sample for the last rank in a step": (Counting, 12 * size + 1, 3, 2),
        "means, the last batch not full": (Mean, 8 * size + 5, 3, 2),
        "means, no sample for the last rank in a step": (Mean, 12 * size + 1, 3, 2),
        "means, one sample at a time": (Mean, 4 * size + 1, 1, 3),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, *rest) in cases.items():
            found, steps = train(kind, DPFuseTrainer, *rest, folder=folder)
            if dist.get_rank() == 0:
                print(f"{name}: {found:.1e} after {steps} steps")
            assert found < 1e-12, (name, found)
        for kind in (Counting, Mean):
            found, steps = train(kind, Trainer, 12 * size + 1, 3, 2, folder=folder)
            if dist.get_rank() == 0:
                print(f"transformers' own, {kind.__name__}: {found:.1e} after {steps} steps")
            assert found > 1e-6, found
    print("fine")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
