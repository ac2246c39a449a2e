"""The pictures and the network of both MNIST programs. Fashion-MNIST, in the same IDX format, replaces MNIST."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from torch import nn
from torch.utils.data import TensorDataset

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path.append(str(EXAMPLES))

import images  # noqa: E402

__all__ = ["datasets", "network", "parser"]


def network() -> nn.Sequential:
    """Return the network of the documents, for [n, 28, 28]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, images.CLASSES))


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments of both programs."""
    parser = argparse.ArgumentParser(description=description)
    folder = os.environ.get("DPFUSE_DATA") or EXAMPLES.parent / "data"
    parser.add_argument("--data", type=Path, default=folder, help="where the pictures are, or are put")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--limit", type=int, help="use only so many pictures to train and to test")
    return parser


def datasets(options: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Return pairs of a picture, [28, 28] float32 from 0 to 1, and its label, int64, for training and for the test."""
    data = images.load(options.data).first(options.limit)
    train = TensorDataset(data.train_images.float() / 255, data.train_labels)
    test = TensorDataset(data.test_images.float() / 255, data.test_labels)
    return train, test
