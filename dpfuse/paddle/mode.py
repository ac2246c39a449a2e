"""Switches a network to training or evaluation mode for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["network_mode"]


@contextmanager
def network_mode(network: nn.Module, training: bool) -> Iterator[None]:
    """Put the network in training or evaluation mode for the block. Then restore the mode of every module."""
    before = [(module, module.training) for module in network.modules()]
    network.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was
