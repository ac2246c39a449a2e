"""Lists of tensor shapes as a bucket would hold them: read from `bench/sizes/`, cut to a number of bytes."""

from __future__ import annotations

import json
import math
from itertools import cycle

from bench.architectures import FOLDER, Parameter

__all__ = ["SIZE_LISTS", "bucket_shapes", "load"]

SIZE_LISTS = ("resnet50", "bert_large", "gpt2", "vit_large", "tiny_2000")


def load(name: str) -> list[Parameter]:
    """(name, shape) of each parameter of `name`, one of `SIZE_LISTS`, in registration order."""
    rows = json.loads((FOLDER / f"{name}.json").read_text())
    return [(parameter, tuple(shape)) for parameter, shape in rows]


def bucket_shapes(name: str, numel: int) -> list[tuple[int, ...]]:
    """Shapes with exactly `numel` elements, as backward would fill a buffer of that size.

    The parameters come in reverse registration order and start over where they do not suffice; the last one
    is cut to what is missing.

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
