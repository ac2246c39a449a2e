"""`paddle.metric`: metrics over many batches. They are local to a process: gather outputs and labels first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dpfuse.arguments import instance, integer
from dpfuse.paddle.counterparts import lacks

__all__ = ["Accuracy", "Metric", "accuracy"]

__getattr__ = lacks(__name__)


class Metric(ABC):
    """A value over many batches: call `update(*compute(outputs, labels))` for each batch, then `accumulate()`."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all batches."""

    @abstractmethod
    def update(self, *args: Any) -> Any:
        """Add the result of `compute` for a batch. It may return the value of this batch."""

    @abstractmethod
    def accumulate(self) -> Any:
        """Return the value over all batches since `reset`."""

    @abstractmethod
    def name(self) -> str | list[str]:
        """Return the name of the value, or the names if there are several values."""

    def compute(self, *args: Any) -> Any:
        """Reduce outputs and labels of a batch on their device. By default they are returned unchanged."""
        return args


class Accuracy(Metric):
    """The fraction of samples with a label among the k classes with the highest scores.

    Args:
        topk: k, or several values of k.
        name: prefix of the names; None means "acc".

    Raises:
        TypeError, ValueError: `topk` does not consist of integers above 0.

    Example:
        >>> import torch
        >>> from dpfuse.paddle.metric import Accuracy
        >>> metric = Accuracy(topk=(1, 2))
        >>> scores = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.4, 0.1]])
        >>> metric.update(metric.compute(scores, torch.tensor([1, 1])))
        [0.5, 1.0]
        >>> metric.name(), metric.accumulate()
        (['acc_top1', 'acc_top2'], [0.5, 1.0])

    Source: `paddle.metric.Accuracy`.
    """

    def __init__(self, topk: int | Sequence[int] = (1,), name: str | None = None) -> None:
        self.topk = tuple(topk) if isinstance(topk, Iterable) else (topk,)
        if not self.topk:
            raise ValueError("topk is empty; pass k, or a tuple such as (1, 5)")
        for k in self.topk:
            integer("topk", k, 1)
        instance("name", name, (str, NoneType), "the begin of the names, or None")
        self.maxk = max(self.topk)
        base = name or "acc"
        self.total: list[float] = []
        self.count: list[int] = []
        self._name = [base] if self.maxk == 1 else [f"{base}_top{k}" for k in self.topk]
        self.reset()

    def compute(self, pred: Tensor, label: Tensor, *args: Any) -> Tensor:
        """Return which of the best classes are the label.

        Args:
            pred: scores [N, ..., classes].
            label: class ids [N] or [N, ..., 1], or one-hot [N, ..., classes]; on the device of `pred`.

        Returns:
            float32 [N, ..., maxk]: 1 where the label is the class with the i-th highest score. The last size is smaller
            if there are fewer classes.
        """
        try:
            return _hits(pred, label, self.maxk).to(torch.float32)
        except AttributeError:
            _check_tensors(pred=pred, label=label)
            raise

    def update(self, correct: Tensor | ArrayLike, *args: Any) -> float | list[float]:
        """Add a batch.

        Args:
            correct: the result of `compute`; tensor or array.

        Returns:
            The accuracy of this batch; a list with one value per k if `topk` has several.
        """
        hits = correct.detach().cpu().numpy() if isinstance(correct, Tensor) else np.asarray(correct)
        samples = int(np.prod(hits.shape[:-1]))
        if not hits.ndim:
            raise TypeError(
                f"correct must be what compute() returned, got {correct!r:.100} of type {type(correct).__name__}"
            )
        found = [float(hits[..., :k].sum()) for k in self.topk]
        self.total = [total + hit for total, hit in zip(self.total, found, strict=True)]
        self.count = [count + samples for count in self.count]
        return self._each([hit / samples if samples else 0.0 for hit in found])

    def reset(self) -> None:
        """Forget all batches."""
        self.total = [0.0] * len(self.topk)
        self.count = [0] * len(self.topk)

    def accumulate(self) -> float | list[float]:
        """Return the accuracy since `reset`, 0.0 without samples; a list with one value per k if there are several."""
        return self._each(
            [total / count if count else 0.0 for total, count in zip(self.total, self.count, strict=True)]
        )

    def name(self) -> list[str]:
        """Return `["acc"]`, or `["acc_top1", "acc_top5"]` for `topk=(1, 5)`; a list, as in Paddle."""
        return self._name

    def _each(self, values: list[float]) -> float | list[float]:
        return values[0] if len(values) == 1 else values


def accuracy(
    input: Tensor, label: Tensor, k: int = 1, correct: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Return the fraction of samples of one batch with a label among the k classes with the highest scores.

    Args:
        input: scores [N, classes].
        label: class ids [N] or [N, 1], on the device of `input`.
        k: number of best classes that count.
        correct: an integer tensor of one element; the number of correct samples is written to it.
        total: an integer tensor of one element; the number of samples is written to it.

    Returns:
        A float32 tensor without dimensions, on the device of `input`.

    Raises:
        TypeError, ValueError: `k` is not an integer above 0.

    Example:
        >>> import torch
        >>> from dpfuse.paddle.metric import accuracy
        >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([[1], [1]]))
        tensor(0.5000)

    Source: `paddle.metric.accuracy`.
    """
    integer("k", k, 1)
    try:
        hits = _hits(input, label, k).any(-1)
        if correct is not None:
            correct.copy_(hits.sum())
        if total is not None:
            total.fill_(hits.numel())
    except AttributeError:
        outputs = {"correct": correct, "total": total}
        _check_tensors(input=input, label=label, **{name: out for name, out in outputs.items() if out is not None})
        raise
    return hits.to(torch.float32).mean()


def _check_tensors(**tensors: Any) -> None:
    """Raise TypeError for what is no tensor. Called after a failure only, since metrics run in each step."""
    for name, tensor in tensors.items():
        instance(name, tensor, Tensor, "a torch.Tensor")


def _hits(pred: Tensor, label: Tensor, k: int) -> Tensor:
    """Return whether the i-th best class is the label, bool [N, ..., min(k, classes)]."""
    best = pred.topk(min(k, pred.shape[-1]), dim=-1).indices
    if label.ndim == pred.ndim - 1:
        label = label.unsqueeze(-1)
    elif label.ndim == pred.ndim and label.shape[-1] != 1:
        label = label.argmax(-1, keepdim=True)
    if label.shape[:-1] != pred.shape[:-1]:
        raise ValueError(
            f"label has shape {tuple(label.shape)} for scores of shape {tuple(pred.shape)}; expected one label, or one "
            "one-hot row, for each row of scores"
        )
    return best == label
