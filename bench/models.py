"""The models for timing, each with the loss of one fixed batch. Nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from bench.large_models import BertLarge, Gpt2, ResNet50

__all__ = ["CUDA_MODELS", "HOST_MODELS", "PAIR_MODELS", "Workload", "layers", "load_model"]

HOST_NUMEL = 16  # elements per parameter if only the host's work is of interest


class Workload(NamedTuple):
    """A module, and a function that runs it (or its wrapper) and returns a scalar loss."""

    module: nn.Module
    loss: Callable[[nn.Module], Tensor]


class _Weights(nn.Module):
    """`count` parameters of `numel` elements each, registered in this module itself."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        for index in range(count):
            # Near one, so that a product of a thousand factors does not vanish or overflow.
            self.register_parameter(f"weight{index}", nn.Parameter(torch.empty(numel).uniform_(0.9, 1.1)))


class _Chain(_Weights):
    """One element-wise product per parameter: parameters become ready one by one, with little work in between."""

    def forward(self, x: Tensor) -> Tensor:
        for weight in cast("dict[str, Tensor]", self._parameters).values():
            x = x * weight
        return x


class _Fan(_Weights):
    """One concatenation of all parameters: all become ready together."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.parameters())) * x


def _summed(module: nn.Module, *inputs: Tensor) -> Workload:
    return Workload(module, lambda model: model(*inputs).sum())


def chain(count: int) -> Workload:
    """Return `count` parameters of 16 elements, with one product each."""
    return _summed(_Chain(count, HOST_NUMEL), torch.randn(HOST_NUMEL))


def fan(count: int, numel: int = HOST_NUMEL) -> Workload:
    """Return `count` parameters of `numel` elements, concatenated."""
    return _summed(_Fan(count, numel), torch.randn(count * numel))


def linear(count: int) -> Workload:
    """Return `count` linear layers of 4 x 4 without bias, one after another."""
    return layers(count, 4)


def layers(count: int, features: int, rows: int = 1) -> Workload:
    """Return `count` square linear layers without bias, one after another, on a batch of `rows`."""
    linears = [nn.Linear(features, features, bias=False) for _ in range(count)]
    for layer in linears:
        # Near the identity: with torch's default, activations and gradients of so many layers vanish.
        nn.init.normal_(layer.weight, std=0.03 / features**0.5)
        layer.weight.data.diagonal().add_(1)
    return _summed(nn.Sequential(*linears), torch.randn(rows, features))


def small_cnn() -> Workload:
    """Return six convolutions with BatchNorms, 4.4 MB of parameters, on one image of 32 x 32."""
    widths, made = (64, 64, 128, 128, 256, 256), []
    for number, (inputs, outputs) in enumerate(zip((3, *widths), widths, strict=False)):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        made += [conv, nn.BatchNorm2d(outputs), nn.ReLU(), *([nn.MaxPool2d(2)] if number % 2 else [])]
    module = nn.Sequential(*made, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    images = torch.randn(1, 3, 32, 32)
    return Workload(module, lambda model: model(images).square().mean())


def small_transformer() -> Workload:
    """Return GPT-2 with four layers of width 256 and 256 words, 13.8 MB of parameters, on one text of 32 tokens."""
    tokens = torch.randint(256, (1, 32))
    return Workload(Gpt2(hidden=256, layers=4, heads=4, words=256), lambda model: model(tokens).square().mean())


def resnet50() -> Workload:
    """Return ResNet-50 on 64 images of 224 x 224, float32."""
    criterion, labels = nn.CrossEntropyLoss(), torch.randint(1000, (64,))
    images = torch.randn(64, 3, 224, 224)
    return Workload(ResNet50(), lambda model: criterion(model(images), labels))


def bert_large() -> Workload:
    """Return BERT-large with random weights, without dropout, on 8 sequences of 128 tokens, float32."""
    tokens = torch.randint(30522, (8, 128))
    return Workload(BertLarge(), lambda model: model(tokens).square().mean())


def tiny_2000() -> Workload:
    """Return 2000 parameters of 4 KB, concatenated."""
    return fan(2000, 1024)


HOST_MODELS: dict[str, Callable[[int], Workload]] = {"chain": chain, "fan": fan, "linear": linear}
PAIR_MODELS: dict[str, Callable[[], Workload]] = {
    "1000 tiny": lambda: chain(1000),
    "100 MB large": lambda: layers(25, 1024),
    "CNN": small_cnn,
    "transformer": small_transformer,
}
CUDA_MODELS: dict[str, Callable[[], Workload]] = {
    "ResNet-50 b64": resnet50,
    "BERT-large b8": bert_large,
    "2000 x 4 KB": tiny_2000,
}


def load_model(place: str) -> Workload:
    """Return the workload of a user's function, given as `package.module:function`.

    The function takes no arguments and returns (module, loss), like the fields of `Workload`. Its new tensors are on
    the GPU if there is one.

    Raises:
        ValueError: `place` has another form, or there is no such function.
    """
    module, _, function = place.partition(":")
    build = getattr(importlib.import_module(module), function, None) if module and function else None
    if build is None:
        raise ValueError(f"no model at {place!r}; expected package.module:function, importable from here")
    return Workload(*build())
