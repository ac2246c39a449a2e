"""A line of a trace as JSON values: hashes are read from the device, and written as texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from dpfuse.engine.tensor_hash import read, text_of
from dpfuse.trace_file import BEFORE_STEP, HOOKED, MODULE_BUFFERS

__all__ = ["as_json"]

HASHES = {  # fields with one hash or a list of them, or with one of these for each model
    "stepped", BEFORE_STEP, "parameters", "all_parameters", "local", HOOKED, "averaged", "all_averaged", MODULE_BUFFERS,
    "weights", "inputs", "outputs", "buffers", "loss",
}  # fmt: skip


def as_json(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line as JSON values, after one wait for the device."""
    numbers = iter(read([*_hashes_in(line)]))

    def resolved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.double().item() if value.is_floating_point() else next(numbers)
        if isinstance(value, dict):
            return {name: resolved(one) for name, one in value.items()}
        return [resolved(one) for one in value] if isinstance(value, list) else value

    return _in_characters(resolved(line))


def _hashes_in(value: Any) -> Iterator[Tensor]:
    """Yield the hashes that are still on a device. Other numbers are of a floating type."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            yield value
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _hashes_in(one)


def _in_characters(line: dict[str, Any]) -> dict[str, Any]:
    """Write hashes as texts: eight characters for each."""
    for name, value in line.items():
        if name in HASHES:
            line[name] = _text(value)
        elif name in ("forwards", "backwards"):
            line[name] = [_in_characters(one) for one in value]
        elif name == "value" and isinstance(value, float) and not math.isfinite(value):
            line[name] = repr(value)
    return line


def _text(hashes: Any) -> Any:
    if isinstance(hashes, dict):
        return {model: _text(one) for model, one in hashes.items()}
    return text_of(hashes if isinstance(hashes, list) else [hashes])
