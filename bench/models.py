"""The models whose steps are timed, each with the loss of one fixed batch. Nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from bench.large_models import BertLarge, ResNet50

__all__ = ["CUDA_MODELS", "HOST_MODELS", "PAIR_MODELS", "Workload", "layers", "load_model"]

HOST_NUMEL = 16  # elements per parameter where only the host's work is of interest


class Workload(NamedTuple):
    """A module, and the function that runs it, or a wrapper around it, to a scalar loss."""

    module: nn.Module
    loss: Callable[[nn.Module], Tensor]


class _Weights(nn.Module):
    """`count` parameters of `numel` elements each, registered in this module itself."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        for index in range(count):
            # Near one, so that a product of a thousand neither vanishes nor overflows.
            self.register_parameter(f"weight{index}", nn.Parameter(torch.empty(numel).uniform_(0.9, 1.1)))


class _Chain(_Weights):
    """One element-wise product per parameter: they become ready one by one, with the least work between them."""

    def forward(self, x: Tensor) -> Tensor:
        for weight in cast("dict[str, Tensor]", self._parameters).values():
            x = x * weight
        return x


class _Fan(_Weights):
    """One concatenation of all parameters: they become ready together."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.parameters())) * x


def _summed(module: nn.Module, *inputs: Tensor) -> Workload:
    return Workload(module, lambda model: model(*inputs).sum())


def chain(count: int) -> Workload:
    """`count` parameters of 16 elements, one product each."""
    return _summed(_Chain(count, HOST_NUMEL), torch.randn(HOST_NUMEL))


def fan(count: int, numel: int = HOST_NUMEL) -> Workload:
    """`count` parameters of `numel` elements, concatenated."""
    return _summed(_Fan(count, numel), torch.randn(count * numel))


def linear(count: int) -> Workload:
    """`count` linear layers of 4 x 4 without bias, one after another."""
    return layers(count, 4)


def layers(count: int, features: int, rows: int = 1) -> Workload:
    """`count` square linear layers without bias, one after another, on a batch of `rows`."""
    linears = [nn.Linear(features, features, bias=False) for _ in range(count)]
    for layer in linears:
        # Near the identity: with torch's own start, activations and gradients of so many layers vanish.
        nn.init.normal_(layer.weight, std=0.03 / features**0.5)
        layer.weight.data.diagonal().add_(1)
    return _summed(nn.Sequential(*linears), torch.randn(rows, features))


def resnet50() -> Workload:
    """ResNet-50 on 64 images of 224 x 224, float32."""
    criterion, labels = nn.CrossEntropyLoss(), torch.randint(1000, (64,))
    images = torch.randn(64, 3, 224, 224)
    return Workload(ResNet50(), lambda model: criterion(model(images), labels))


def bert_large() -> Workload:
    """BERT-large with random weights and without dropout, 8 sequences of 128 tokens, float32."""
    tokens = torch.randint(30522, (8, 128))
    return Workload(BertLarge(), lambda model: model(tokens).square().mean())


def tiny_2000() -> Workload:
    """2000 parameters of 4 KB, concatenated."""
    return fan(2000, 1024)


HOST_MODELS: dict[str, Callable[[int], Workload]] = {"chain": chain, "fan": fan, "linear": linear}
PAIR_MODELS: dict[str, Callable[[], Workload]] = {
    "1000 tiny": lambda: chain(1000),
    "100 MB large": lambda: layers(25, 1024),
}
CUDA_MODELS: dict[str, Callable[[], Workload]] = {
    "ResNet-50 b64": resnet50,
    "BERT-large b8": bert_large,
    "2000 x 4 KB": tiny_2000,
}


def load_model(place: str) -> Workload:
    """The workload of a user's own function, given as `package.module:function`.

    The function takes no argument and returns (module, loss), like the fields of `Workload`. Tensors that it
    makes lie on the GPU where there is one.

    Raises:
        ValueError: `place` is not of that form, or there is no such function.
    """
    module, _, function = place.partition(":")
    build = getattr(importlib.import_module(module), function, None) if module and function else None
    if build is None:
        raise ValueError(f"no model at {place!r}; expected package.module:function, importable from here")
    return Workload(*build())
