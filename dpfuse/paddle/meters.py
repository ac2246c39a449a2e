"""Meters: one interface for the metrics of a model, both Paddle's kind and torchmetrics' kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Meters", "as_list", "to_numpy"]

TAKEN = {"loss", "step", "batch_size"}  # names in the logs that are no metrics


def as_list(value: Any) -> list[Any]:
    """Return one object, several objects or None as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def to_numpy(value: Any) -> Any:
    """Return a tensor as an array. Numpy has no bfloat16, which becomes float32. Return other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


class Meters:
    """Updates every metric with outputs and labels, and collects the values by name.

    Metrics of Paddle's kind have `compute`, `update`, `accumulate`, `name` and `reset`. Metrics of torchmetrics' kind
    have `update(preds, target)`, `compute` and `reset`, and their name is that of the class. Metrics must not exchange
    anything between ranks: for torchmetrics this is switched off.
    """

    def __init__(self, metrics: Any, device: torch.device) -> None:
        self._metrics = as_list(metrics)
        self._names: list[list[str]] = []
        taken = set(TAKEN)
        for metric in self._metrics:
            kind = "update", "reset", "compute"
            if isinstance(metric, type) or not all(callable(getattr(metric, name, None)) for name in kind):
                raise TypeError(
                    f"metrics: {metric!r} is no metric; expected an object with compute, update, accumulate, name and "
                    "reset (Paddle's), or with update, compute and reset (torchmetrics')"
                )
            if isinstance(metric, nn.Module):
                metric.to(device)
                for part in metric.modules():
                    if hasattr(part, "sync_on_compute"):
                        setattr(part, "sync_on_compute", False)  # noqa: B010  # a module's attributes are typed as modules
            names = as_list(metric.name()) if _is_paddles(metric) else [type(metric).__name__.lower()]
            self._names.append([_unique(name, taken) for name in names])

    @property
    def names(self) -> list[str]:
        """The names of the values. A metric that returns a dict adds the keys to them."""
        return [name for names in self._names for name in names]

    def __len__(self) -> int:
        return len(self._metrics)

    def reset(self) -> None:
        """Forget all batches."""
        for metric in self._metrics:
            metric.reset()

    def update(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Any]:
        """Add a batch. Return the results of the metrics' `update`."""
        results = []
        for metric in self._metrics:
            if _is_paddles(metric):
                computed = metric.compute(*outputs, *labels)
                results.append(metric.update(*map(to_numpy, as_list(computed))))
            else:
                results.append(metric.update(*outputs, *labels))
        return results

    def values(self) -> dict[str, Any]:
        """Return the values over all batches since `reset`."""
        found: dict[str, Any] = {}
        taken = TAKEN.union(self.names)
        for metric, names in zip(self._metrics, self._names, strict=True):
            if _is_paddles(metric):
                found.update(zip(names, as_list(metric.accumulate()), strict=True))
                continue
            value = metric.compute()
            if isinstance(value, Mapping):
                found.update({_unique(str(key), taken): _plain(part) for key, part in value.items()})
            else:
                found[names[0]] = _plain(value)
        return found


def _is_paddles(metric: Any) -> bool:
    return hasattr(metric, "accumulate")


def _plain(value: Any) -> Any:
    array: np.ndarray[Any, Any] = np.asarray(to_numpy(value))
    return array.item() if array.size == 1 else array


def _unique(name: str, taken: set[str]) -> str:
    free = next(n for i in range(1, len(taken) + 2) if (n := name if i == 1 else f"{name}_{i}") not in taken)
    taken.add(free)
    return free
