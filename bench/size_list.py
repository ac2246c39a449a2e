"""Lists of tensor shapes as in a bucket: read from `bench/sizes/`, cut to a number of bytes."""

from __future__ import annotations

import json
import math
from itertools import cycle

from bench.architectures import FOLDER, Parameter

__all__ = ["SIZE_LISTS", "bucket_shapes", "load"]

SIZE_LISTS = ("resnet50", "bert_large", "gpt2", "vit_large", "tiny_2000")


def load(name: str) -> list[Parameter]:
    """Return (name, shape) of each parameter of `name`, one of `SIZE_LISTS`, in registration order."""
    rows = json.loads((FOLDER / f"{name}.json").read_text())
    return [(parameter, tuple(shape)) for parameter, shape in rows]


def bucket_shapes(name: str, numel: int) -> list[tuple[int, ...]]:
    """Return shapes with exactly `numel` elements, in the order in which backward would fill such a buffer.

    The parameters are in reverse registration order, and are repeated if there are not enough. The last one is cut to
    the remaining size.

    Example:
        >>> from bench.size_list import bucket_shapes
        >>> bucket_shapes("tiny_2000", 2500)
        [(1024,), (1024,), (452,)]
    """
    shapes: list[tuple[int, ...]] = []
    missing = numel
    for _, shape in cycle(reversed(load(name))):
        size = math.prod(shape)
        if size >= missing:
            shapes.append(shape if size == missing else (missing,))
            return shapes
        shapes.append(shape)
        missing -= size
    raise ValueError(f"the size list {name!r} is empty")
