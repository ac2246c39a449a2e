"""Means over all tokens through subclasses of `DPFuseTrainer`: samplers, losses and collators of their own."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch.distributed as dist
from torch.utils.data import SubsetRandomSampler

import dpfuse
from dpfuse.integrations.transformers import DPFuseTrainer

sys.path.append(str(Path(__file__).parent))
from sentences import Bigrams, items, loss_of, sentences, together
from with_trainer import Counting, Mean, train


class Sampling(DPFuseTrainer):
    """Each epoch has some of the samples, and no more."""

    number: int

    def _get_train_sampler(self, *args, **kwargs):
        return SubsetRandomSampler(range(len(self.train_dataset) - self.number, len(self.train_dataset)))


class Scores(Bigrams):
    """Returns no loss."""

    def forward(self, input_ids, number):
        self.steps[-1] += [(self.epoch, each) for each in number.tolist()]
        return self.scores(input_ids)


class Losing(DPFuseTrainer):
    """Computes the loss itself, as the mean of a batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return loss_of(model(**inputs), labels)


class Divided(Losing):
    """The losses of a step add up to the mean of this rank."""

    loss_is_scaled_for_ga = True

    def get_batch_samples(self, *args):
        batches, number = super().get_batch_samples(*args)
        self.items = sum(items(batch["labels"]) for batch in batches)
        return batches, number

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return loss_of(model(**inputs), labels, "sum") / self.items


class Lists(Losing):
    """Makes the batch itself, of samples in a list, as trainers of preferences do."""

    def _prepare_inputs(self, inputs):
        return together(inputs)


def same_length(samples):
    """Sentences cut to one word each, so that samples count as tokens do."""
    return [{**one, "input_ids": one["input_ids"][:1], "labels": one["labels"][:1]} for one in samples]


def renamed(samples):
    """A batch without "labels"."""
    batch = together(samples)
    return {"input_ids": batch["input_ids"], "targets": batch["labels"], "number": batch["number"]}


class Targets(Bigrams):
    """Returns scores and targets."""

    def forward(self, input_ids, targets, number):
        self.steps[-1] += [(self.epoch, each) for each in number.tolist()]
        return self.scores(input_ids), targets


def loss_of_outputs(outputs, labels, num_items_in_batch=None):
    assert (labels, num_items_in_batch) == (None, None)
    return loss_of(*outputs)


def main():
    dpfuse.init_parallel_env()
    size = dist.get_world_size()
    words = same_length(sentences(12 * size + 1))
    cases = {
        # All batches are full. By the length of the data set, 1 sample of the last step would count.
        "fewer samples than the data set has": (Counting, 12 * size, {"data": sentences(15 * size + 1)}),
        "fewer samples, whose last batch is not full": (Counting, 9 * size + 1, {"data": sentences(12 * size)}),
        "fewer samples, means": (Mean, 8 * size + 2, {"data": sentences(12 * size)}),
        "a resumed epoch": (Counting, 9 * size + 1, {"trainer": DPFuseTrainer, "resumed": True}),
        "a loss of the trainer": (Scores, 11 * size + 1, {"trainer": Losing}),
        "losses that add up": (Scores, 11 * size + 1, {"trainer": Divided}),
        "batches of the trainer": (Scores, 11 * size + 1, {"trainer": Lists, "collator": list, "data": words[:-size]}),
        "a function for the loss": (
            Targets,
            12 * size + 1,
            {"trainer": DPFuseTrainer, "collator": renamed, "data": words, "compute_loss_func": loss_of_outputs},
        ),
    }
    only = sys.argv[1:]  # names of cases; all, without any
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, samples, how) in cases.items():
            if only and name not in only:
                continue
            shared = [folder]
            dist.broadcast_object_list(shared)
            trainer = how.pop("trainer", Sampling)
            Sampling.number = samples
            found, steps = train(kind, trainer, samples, 3, 2, folder=shared[0], **how)
            if dist.get_rank() == 0:
                print(f"{name}: {found:.1e} after {steps} steps", flush=True)
            assert found < 1e-12, (name, found)
    print("fine")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
