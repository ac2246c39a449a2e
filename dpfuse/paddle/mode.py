"""Training and evaluation mode of a network, switched for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["network_mode"]


@contextmanager
def network_mode(network: nn.Module, training: bool) -> Iterator[None]:
    """The network in training or evaluation mode; afterwards every part is in the mode it was in."""
    before = [(module, module.training) for module in network.modules()]
    network.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was
