"""Sentences of different lengths, a model in float64, and one process that trains with all tokens of each step."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORDS, IGNORED = 13, -100


def sentences(count):
    """Of 1 to 9 words each; some labels do not count."""
    made = []
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        length = int(torch.randint(1, 10, (), generator=generator))
        words = torch.randint(0, WORDS, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < 0.2, IGNORED, words.roll(1))
        labels[0] = words[0]  # no sentence is without labels
        made.append({"input_ids": words, "labels": labels, "number": torch.tensor(number)})
    return made


def together(samples):
    """One batch: padded to the longest, where nothing counts."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([one["input_ids"] for one in samples], batch_first=True),
        "labels": pad([one["labels"] for one in samples], batch_first=True, padding_value=IGNORED),
        "number": torch.stack([one["number"] for one in samples]),
    }


class Bigrams(nn.Module):
    """Scores of the next word."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = nn.Embedding(WORDS, 8, dtype=torch.float64)
        self.body = nn.Linear(8, WORDS, dtype=torch.float64)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))

    def scores(self, input_ids):
        return self.body(torch.tanh(self.table(input_ids)))


def loss_of(scores, labels, reduction="mean"):
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def items(labels):
    return labels.ne(IGNORED).sum()


def alone(model, data, steps, rate, momentum=0.9):
    """Train a copy with all samples of each step, whose numbers are given by step; return it."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=momentum)
    for numbers in steps:
        batch = together([data[number] for number in sorted(numbers)])
        loss_of(model.scores(batch["input_ids"]), batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def gathered(steps):
    """The numbers of the samples of each step, of all ranks together, from those of this rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return steps
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, steps)
    return [[number for part in step for number in part] for step in zip(*parts, strict=True)]


def difference(model, other):
    """The largest of any two parameters."""
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), other.parameters(), strict=True))
