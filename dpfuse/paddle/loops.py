"""The loops of Model over batches: a training epoch, an evaluation, a prediction. Knows no user arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfuse.paddle.batch_split import BatchSplit
from dpfuse.paddle.batches import Batches, Distribution, Shares
from dpfuse.paddle.callback_base import CallbackList
from dpfuse.paddle.collectives import agree, world_size
from dpfuse.paddle.meters import Meters, to_numpy
from dpfuse.paddle.mode import network_mode
from dpfuse.paddle.stepper import Stepper

__all__ = ["Loops"]


class Loops:
    """Iterates over batches with one stepper, and calls the callbacks before and after every batch."""

    def __init__(self, stepper: Stepper, split: BatchSplit, meters: Meters, callbacks: CallbackList) -> None:
        self._stepper = stepper
        self._split = split
        self._meters = meters
        self._callbacks = callbacks

    def train(self, batches: Batches, every: int, limit: int | None) -> dict[str, Any]:
        """Train on one epoch of `batches`, or on its first `limit`. Step after `every` batches and at the end.

        Returns:
            The logs of the last batch; "step" is its number.

        Raises:
            ValueError: There is no batch.
            DPFuseError: The ranks' loaders have no length, and end at different batches. Every rank raises.
        """
        self._meters.reset()
        logs: dict[str, Any] = {}
        looks_ahead = every > 1 or (batches.steps is None and world_size() > 1)
        for step, (batch, last) in enumerate(batches.epoch(limit, looks_ahead=looks_ahead)):
            self._callbacks.call("on_train_batch_begin", step, logs)
            inputs, labels = self._items(batch, labelled=True)
            update = (step + 1) % every == 0 or last
            if update and batches.steps is None:
                _agree_on_end(batches, f"step {step + 1}{', the last' if last else ''}")
            outputs, losses = self._stepper.train(inputs, labels, update)
            self._meters.update(outputs, labels)
            logs = {"loss": [float(loss) for loss in losses], **self._meters.values()}
            logs.update(step=step, batch_size=len(inputs[0]) * world_size())
            self._callbacks.call("on_train_batch_end", step, logs)
        if not logs:
            if batches.steps is None:
                _agree_on_end(batches, "no batch")
            raise ValueError(_no_batch(batches))
        return logs

    def evaluate(self, batches: Batches, limit: int | None) -> dict[str, Any]:
        """Compute loss and metrics over `batches`, or over its first `limit`.

        Returns:
            The logs of the last batch, which hold the values over all batches.
        """
        stepper = self._stepper
        names = ["loss"] * (stepper.loss is not None) + self._meters.names
        steps = batches.steps if limit is None else min(limit, batches.steps or limit)
        self._callbacks.call("on_eval_begin", {"steps": steps, "metrics": names})
        self._meters.reset()
        sums: list[float] = []
        samples = 0
        logs: dict[str, Any] = {}
        with network_mode(stepper.network, training=False):
            for step, pieces in self._pieces(batches, "eval"):
                for piece in pieces:
                    with torch.no_grad():
                        losses = [float(loss) * piece.rows for loss in stepper.losses(piece.outputs, piece.labels)]
                        self._meters.update(piece.outputs, piece.labels)
                    sums = [a + b for a, b in zip(sums or [0.0] * len(losses), losses, strict=True)]
                    samples += piece.rows
                logs = {"loss": [total / samples for total in sums]} if sums else {}
                logs.update(self._meters.values(), step=step, batch_size=sum(piece.rows for piece in pieces))
                self._callbacks.call("on_eval_batch_end", step, logs)
                if step + 1 == limit:
                    break
        if not logs:
            raise ValueError(_no_batch(batches))
        self._callbacks.call("on_eval_end", logs)
        return logs

    def predict(self, batches: Batches) -> list[list[Any]]:
        """Return the outputs for all `batches`: for every output of the network the batches' arrays, in order."""
        self._callbacks.call("on_predict_begin", {"steps": batches.steps})
        found: list[list[Any]] = []
        numbers: list[Any] = []
        with network_mode(self._stepper.network, training=False):
            for step, pieces in self._pieces(batches, "predict"):
                found += [[to_numpy(output) for output in piece.outputs] for piece in pieces]
                numbers += [piece.numbers for piece in pieces]
                logs = {"step": step, "batch_size": sum(piece.rows for piece in pieces)}
                self._callbacks.call("on_predict_batch_end", step, logs)
        if not found:
            raise ValueError(_no_batch(batches))
        outputs = [list(arrays) for arrays in zip(*found, strict=True)]
        if numbers[0] is not None:
            outputs = [_sorted_by(np.concatenate(numbers), arrays) for arrays in outputs]
        self._callbacks.call("on_predict_end", {"steps": batches.steps})
        return outputs

    def _pieces(self, batches: Batches, mode: str) -> Iterator[tuple[int, list[_Piece]]]:
        """Yield the network's outputs step by step. If the batches are shared, these are all ranks' outputs."""
        stepper = self._stepper
        shares = Shares(batches) if batches.distribution is Distribution.SHARED else None
        if batches.distribution is not Distribution.UNKNOWN:
            stepper.share_buffers()
        for step, batch in enumerate(batches.loader):
            self._callbacks.call(f"on_{mode}_batch_begin", step, {})
            inputs, labels = self._items(batch, labelled=mode == "eval")
            outputs = stepper.forward(inputs)
            if shares is None:
                yield step, [_Piece(None, len(inputs[0]), outputs, labels)]
                continue
            numbers, rows = shares.gather([*outputs, *labels])
            cuts = [slice(i, i + shares.batch_size) for i in range(0, len(numbers), shares.batch_size)]
            parts = [[row[cut] for row in rows] for cut in cuts]
            count = len(outputs)
            pieces = zip(cuts, parts, strict=True)
            yield step, [_Piece(numbers[cut], len(numbers[cut]), part[:count], part[count:]) for cut, part in pieces]

    def _items(self, batch: Any, labelled: bool) -> tuple[list[Tensor], list[Tensor]]:
        inputs, labels = self._split(batch, labelled)
        return self._stepper.to_device(inputs), self._stepper.to_device(labels)


@dataclass(frozen=True)
class _Piece:
    """One batch of samples with the network's outputs."""

    numbers: np.ndarray[Any, Any] | None  # in the dataset, ascending; None if unknown
    rows: int
    outputs: list[Tensor]
    labels: list[Tensor]


def _sorted_by(numbers: np.ndarray[Any, Any], arrays: list[Any]) -> list[Any]:
    if (numbers[1:] > numbers[:-1]).all():
        return arrays
    cuts = np.cumsum([len(array) for array in arrays])[:-1]
    return np.split(np.concatenate(arrays)[np.argsort(numbers)], cuts)


def _agree_on_end(batches: Batches, fact: str) -> None:
    remedy = "Give every rank the same number of batches, or set num_iters to the smallest number."
    agree(f"{batches.name}: {fact}", "the end of the ranks' data", remedy)


def _no_batch(batches: Batches) -> str:
    return (
        f"{batches.name} gave no batch; expected at least one. Is it empty, are all batches dropped (drop_last), or is "
        "it an iterator that an earlier epoch has used up?"
    )
