"""A signal to the last rank ends a training of transformers on all ranks in the same step, and another one goes on.

Argument: a folder.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

import dpfuse
from dpfuse.integrations.transformers import DPFuseTrainer, StopTogether

sys.path.append(str(Path(__file__).parent))
from sentences import Bigrams, loss_of, sentences, together

FOLDER = Path(sys.argv[1])
BATCH = 3
USR1, TERM = signal.SIGUSR1, signal.SIGTERM


class Model(Bigrams):
    """Notes the samples of each batch, and sends a signal in one of them.

    Args:
        sends: the signal, and the number of the batch.
    """

    def __init__(self, sends=(0, -1)):
        super().__init__()
        self.sends, self.batches = sends, []

    def forward(self, input_ids, labels, number, num_items_in_batch=None, **kwargs):
        if self.training:
            if self.sends[1] == len(self.batches) and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), self.sends[0])
            self.batches.append(number.tolist())
        scores = self.scores(input_ids)
        if num_items_in_batch is None:
            return {"loss": loss_of(scores, labels), "logits": scores}
        return {"loss": loss_of(scores, labels, "sum") / num_items_in_batch, "logits": scores}


class Notes(TrainerCallback):
    """In which steps was saved and evaluated?"""

    def __init__(self):
        self.saved, self.evaluated = [], []

    def on_save(self, args, state, control, **kwargs):
        self.saved.append(state.global_step)

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluated.append(state.global_step)


def train(name, model, accumulate, when, kind, resume=False):
    """Train two epochs. Return the callback, the notes and the Trainer."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    arguments = TrainingArguments(
        output_dir=str(FOLDER / name),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=2,
        max_grad_norm=0,
        remove_unused_columns=False,
        save_strategy=when,
        save_steps=1,
        eval_strategy=when,
        eval_steps=1,
        # It would delete the checkpoint of the stop, which is not the best one.
        **({"save_total_limit": 1, "load_best_model_at_end": True} if when == "steps" else {}),
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = sentences(6 * BATCH * dist.get_world_size())
    notes = Notes()
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[: 2 * BATCH],
        data_collator=together,
        optimizers=(optimizer, decay),
        callbacks=[notes],
    )
    stop = StopTogether(trainer)
    trainer.add_callback(stop)
    before = [signal.getsignal(number) for number in (USR1, TERM)]
    with dpfuse.patch():
        trainer.train(resume_from_checkpoint=resume)
    assert [signal.getsignal(number) for number in (USR1, TERM)] == before
    dpfuse.forget_stop()
    dist.barrier()  # rank 0 saves
    return stop, notes, trainer


def of_all(own):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts


def interrupted(name, sends, at, accumulate=1, when="epoch", kind=DPFuseTrainer):
    """Compare two trainings, of which a signal ends the first and the second goes on, with an undisturbed one.

    Args:
        at: the step in which the signal is to end it.
    """
    how = (accumulate, when, kind)
    undisturbed, first, second = Model(), Model(sends), Model()
    _, _, whole = train(f"{name}, undisturbed", undisturbed, *how)
    stop, notes, trainer = train(name, first, *how)
    assert stop.stopped
    assert of_all((trainer.state.global_step, len(first.batches))) == [(at, at * accumulate)] * dist.get_world_size()
    assert notes.saved.count(at) == 1, notes.saved
    assert at not in notes.evaluated, notes.evaluated
    assert (FOLDER / name / f"checkpoint-{at}" / "trainer_state.json").exists()
    stop, notes, trainer = train(name, second, *how, resume=True)
    assert not stop.stopped
    assert trainer.state.global_step == whole.state.global_step
    assert first.batches + second.batches == undisturbed.batches
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), undisturbed.parameters(), strict=True))


def refused():
    """Without dpfuse's wrapper no rank would hear of a stop."""
    arguments = TrainingArguments(output_dir=str(FOLDER), use_cpu=True, report_to=[], remove_unused_columns=False)
    trainer = Trainer(model=Model(), args=arguments, train_dataset=sentences(8), data_collator=together)
    trainer.add_callback(StopTogether(trainer))
    with pytest.raises(dpfuse.DPFuseError, match="which tells all ranks of a stop"):
        trainer.train()


def main():
    dpfuse.init_parallel_env()
    interrupted("forward", (USR1, 3), at=4)
    interrupted("window", (TERM, 2), at=2, accumulate=2)  # the first batch of a window of two
    interrupted("each step", (TERM, 2), at=3, when="steps")
    interrupted("last", (USR1, 5), at=6, kind=Trainer)  # of an epoch
    if dist.get_world_size() > 1:
        refused()
    print("fine")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
