"""Small networks for trainings with a fixed number of micro-batches, and what each micro-batch gives them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["NETS", "batch", "loss_of"]

CLASSES = 5
ROWS = 3


class Block(nn.Module):
    """A layer of a transformer, with dropout in three places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.first(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.2 * self.training)
        x = x + self.dropout(self.joined(seen.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.second(x)))))


class GPT(nn.Module):
    """A language model whose first and last layer share their weight."""

    def __init__(self, vocabulary: int = 11, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(6, width)
        self.blocks = nn.Sequential(Block(width, 2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 9), nn.ReLU(), nn.Linear(9, CLASSES))


def cnn() -> nn.Module:
    first = [nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(6, CLASSES))


class Branches(nn.Module):
    """Parts that some micro-batches use, or none; and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(7, 12)
        self.frozen.requires_grad_(False)
        self.common = nn.Linear(12, CLASSES)
        self.of_one, self.of_most = nn.Linear(7, CLASSES), nn.Linear(7, CLASSES)
        self.of_none = nn.Linear(7, CLASSES)
        self.number = 0  # of the micro-batch

    def forward(self, x: Tensor) -> Tensor:
        out = self.common(torch.tanh(self.frozen(x)))
        if self.number == 1:
            out = out + self.of_one(x)
        if self.number not in (0, 3):
            out = out + self.of_most(x)
        return out


NETS = {"MLP": mlp, "CNN with GroupNorm": cnn, "GPT with dropout": GPT, "branches": Branches}


def batch(net: str, step: int, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a micro-batch. They depend on the step and its number alone."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    if net == "GPT with dropout":
        words = torch.randint(11, (ROWS, 7), generator=generator)
        return words[:, :-1], words[:, 1:]
    shape = (ROWS, 2, 8, 8) if net == "CNN with GroupNorm" else (ROWS, 7)
    targets = torch.randint(CLASSES, (ROWS,), generator=generator)
    return torch.randn(shape, generator=generator).to(dtype), targets


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
