"""Backwards of the networks in published scaling tables, estimated from their layers. Knows no tensor and no network.

A layer's backward takes time in proportion to its multiplications, as `Timeline.synthetic` assumes. Where a backward
was recorded (`bench/timelines/`), the recorded one is used. Sources of the layers: ResNet arXiv 1512.03385, ResNeXt
arXiv 1611.05431, VGG arXiv 1409.1556, Inception V3 arXiv 1512.00567, AlexNet tf_cnn_benchmarks (alexnet_model.py), BERT
arXiv 1810.04805.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bench.record_timeline import load
from dpfuse import ParamSpec
from dpfuse.tune import Timeline

__all__ = ["MODELS", "Layer", "parameters", "timeline_of"]


class Layer(NamedTuple):
    """A parameter, and the number of places at which each of its elements is multiplied."""

    shape: tuple[int, ...]
    places: int


def _convolution(inputs: int, outputs: int, kernel: tuple[int, int], size: int, *, bias: bool = False) -> list[Layer]:
    """Return a convolution with results of size x size, and its bias or its batch normalisation."""
    weight = Layer((outputs, inputs, *kernel), size * size)
    return [weight, *([Layer((outputs,), 1)] * (1 if bias else 2))]


def _linear(inputs: int, outputs: int, places: int = 1) -> list[Layer]:
    return [Layer((outputs, inputs), places), Layer((outputs,), places)]


def _resnet(blocks: tuple[int, ...], groups: int = 1, width: int = 64) -> Iterator[Layer]:
    yield from _convolution(3, 64, (7, 7), 112)
    inputs = 64
    for stage, count in enumerate(blocks):
        inner, outputs, size = width * groups << stage, 256 << stage, 56 >> stage
        for block in range(count):
            first = size * 2 if block == 0 and stage > 0 else size  # the stride is in the 3 x 3 convolution
            yield from _convolution(inputs, inner, (1, 1), first)
            yield from _convolution(inner // groups, inner, (3, 3), size)
            yield from _convolution(inner, outputs, (1, 1), size)
            if block == 0:
                yield from _convolution(inputs, outputs, (1, 1), size)
            inputs = outputs
    yield from _linear(inputs, 1000)


def _vgg16() -> Iterator[Layer]:
    inputs, size = 3, 224
    for outputs, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            yield from _convolution(inputs, outputs, (3, 3), size, bias=True)
            inputs = outputs
        size //= 2
    for sizes in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        yield from _linear(*sizes)


def _alexnet() -> Iterator[Layer]:
    for inputs, outputs, kernel, size in (
        (3, 64, 11, 55),
        (64, 192, 5, 27),
        (192, 384, 3, 13),
        (384, 384, 3, 13),
        (384, 256, 3, 13),
    ):
        yield from _convolution(inputs, outputs, (kernel, kernel), size, bias=True)
    for sizes in ((256 * 6 * 6, 4096), (4096, 4096), (4096, 1000)):
        yield from _linear(*sizes)


def _path(inputs: int, size: int, *steps: tuple[int, tuple[int, int]]) -> Iterator[Layer]:
    for outputs, kernel in steps:
        yield from _convolution(inputs, outputs, kernel, size)
        inputs = outputs


ONE, THREE, FIVE, WIDE, HIGH = (1, 1), (3, 3), (5, 5), (1, 7), (7, 1)


def _inception_a(inputs: int, pooled: int) -> Iterator[Layer]:
    yield from _path(inputs, 35, (64, ONE))
    yield from _path(inputs, 35, (48, ONE), (64, FIVE))
    yield from _path(inputs, 35, (64, ONE), (96, THREE), (96, THREE))
    yield from _path(inputs, 35, (pooled, ONE))


def _inception_c(inner: int) -> Iterator[Layer]:
    yield from _path(768, 17, (192, ONE))
    yield from _path(768, 17, (inner, ONE), (inner, WIDE), (192, HIGH))
    yield from _path(768, 17, (inner, ONE), (inner, HIGH), (inner, WIDE), (inner, HIGH), (192, WIDE))
    yield from _path(768, 17, (192, ONE))


def _inception_e(inputs: int) -> Iterator[Layer]:
    yield from _path(inputs, 8, (320, ONE))
    yield from _path(inputs, 8, (384, ONE), (384, (1, 3)))
    yield from _path(384, 8, (384, (3, 1)))
    yield from _path(inputs, 8, (448, ONE), (384, THREE), (384, (1, 3)))
    yield from _path(384, 8, (384, (3, 1)))
    yield from _path(inputs, 8, (192, ONE))


def _inception_v3() -> Iterator[Layer]:
    """Without the auxiliary classifier."""
    for inputs, outputs, kernel, size in ((3, 32, 3, 149), (32, 32, 3, 147), (32, 64, 3, 147), (64, 80, 1, 73)):
        yield from _convolution(inputs, outputs, (kernel, kernel), size)
    yield from _convolution(80, 192, THREE, 71)
    for inputs, pooled in ((192, 32), (256, 64), (288, 64)):
        yield from _inception_a(inputs, pooled)
    yield from _path(288, 17, (384, THREE))
    yield from _path(288, 35, (64, ONE), (96, THREE))
    yield from _path(96, 17, (96, THREE))
    for inner in (128, 160, 160, 192):
        yield from _inception_c(inner)
    yield from _path(768, 17, (192, ONE))
    yield from _path(192, 8, (320, THREE))
    yield from _path(768, 17, (192, ONE), (192, WIDE), (192, HIGH))
    yield from _path(192, 8, (192, THREE))
    for inputs in (1280, 2048):
        yield from _inception_e(inputs)
    yield from _linear(2048, 1000)


def _bert_base() -> Iterator[Layer]:
    """With pooler. The word embedding is also the head, so its gradient is complete at the end."""
    hidden, tokens = 768, 128
    for rows in (30522, 512, 2):
        yield Layer((rows, hidden), 0)
    for _ in range(12):
        for _ in range(4):
            yield from _linear(hidden, hidden, tokens)
        yield from _linear(hidden, 4 * hidden, tokens)
        yield from _linear(4 * hidden, hidden, tokens)
        yield from [Layer((hidden,), tokens)] * 4
    yield from [Layer((hidden,), tokens)] * 2
    yield from _linear(hidden, hidden)


LAYERS: dict[str, Callable[[], Iterator[Layer]]] = {
    "resnet101": lambda: _resnet((3, 4, 23, 3)),
    "resnet152": lambda: _resnet((3, 8, 36, 3)),
    "resnext50_32x4d": lambda: _resnet((3, 4, 6, 3), groups=32, width=4),
    "resnext101_32x8d": lambda: _resnet((3, 4, 23, 3), groups=32, width=8),
    "vgg16": _vgg16,
    "alexnet": _alexnet,
    "inception_v3": _inception_v3,
    "bert_base": _bert_base,
}
RECORDED = ("resnet50", "bert_large")
MODELS = (*RECORDED, *LAYERS)


def timeline_of(name: str) -> Timeline:
    """Return the backward of one of `MODELS`, on float32 gradients."""
    if name in RECORDED:
        return load(name)[0]
    layers = list(LAYERS[name]())
    specs = [ParamSpec(f"{index}", layer.shape, "float32") for index, layer in enumerate(layers)]
    return Timeline.synthetic(specs, 1.0, work=[math.prod(layer.shape) * layer.places for layer in layers])


def parameters(name: str) -> int:
    """Return the number of elements of all parameters.

    Example:
        >>> from bench.published_models import parameters
        >>> parameters("vgg16"), parameters("resnet101")
        (138357544, 44549160)
    """
    return sum(spec.numel for spec in timeline_of(name).specs)
