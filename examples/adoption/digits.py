"""scikit-learn's 1797 handwritten digits, and a small network for them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

__all__ = ["dataset", "network"]


def dataset() -> TensorDataset:
    """Return images of 8 x 8 pixels with brightness 0 to 1, and their digits."""
    bunch = load_digits()
    return TensorDataset(torch.as_tensor(bunch.images / 16).float(), torch.as_tensor(bunch.target).long())


def network() -> nn.Module:
    """Return the network, with the same weights on every rank and in each run. Its gradients have 0.2 MB."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(),
        nn.Linear(256, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip
