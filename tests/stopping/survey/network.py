"""The network and the samples of all programs of the survey."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["BATCH", "EPOCHS", "LENGTH", "WIDTH", "Samples", "Unordered"]

LENGTH, WIDTH, EPOCHS = 48, 17, 3
BATCH = 4  # samples of a micro-batch of one rank


class Unordered(nn.Module):
    """Uses its layers in another order than it registers them. Dropout needs the random states of its rank.

    Args:
        dropout: the probability of a zero.
    """

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self._dropout = dropout
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return as many numbers for each sample as it has."""
        for place in (4, 1, 6, 0, 3, 5, 2):
            inputs = inputs + torch.tanh(self.layers[place](inputs))
        return nn.functional.dropout(inputs, self._dropout, self.training)


class Samples(Dataset[tuple[int, Tensor]]):
    """Numbered samples, which need no file."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
