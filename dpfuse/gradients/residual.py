"""What rounding has taken from the gradients of one bucket, beside its buffer. Knows no collective and no order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dpfuse.engine.plan import Bucket
from dpfuse.gradients.error_feedback import ErrorFeedback, ResidualSpec
from dpfuse_kernels import PointerTable

__all__ = ["Residual"]


class Residual:
    """The part of a model's error feedback that lies beside one bucket's buffer, with the offsets of its slots.

    Args:
        feedback: of the model.
        order: place of the bucket in the order of communication.
        bucket: its plan.
        params: the parameters, in the order of `bucket.params`.
        names: their names.
    """

    def __init__(
        self, feedback: ErrorFeedback, order: int, bucket: Bucket, params: Sequence[Tensor], names: Sequence[str]
    ) -> None:
        self._feedback = feedback
        self._order = order
        self._names = names
        self._indices = bucket.params
        device = torch.device(bucket.device)
        self.specs = [
            ResidualSpec(name, (*param.shape, 2) if param.is_complex() else tuple(param.shape), device)
            for name, param in zip(names, params, strict=True)
        ]
        self._flat: Tensor | None = None
        self._packed = False  # whether what is sent next was
        self._views: list[Tensor] = []
        self._kept: dict[int, Tensor] = {}  # by registration index, until it is known whether it was sent in vain

    def before_pack(self, table: PointerTable, numel: int, missing: Collection[int]) -> Tensor:
        """What to add to the gradients, [numel] float32, and where to leave what rounding takes from them.

        Args:
            table: of the gradients, and of a tail, if there is one: nothing is added to that.
            numel: that the buffer has room for.
            missing: registration indices of the parameters without gradient, which send what is here.
        """
        self._feedback.begin(self._order)
        self._packed = True
        if self._flat is None:
            self._flat = torch.zeros(numel, device=table.flat.device)
            self._views = [
                self._flat.as_strided(slot.shape, slot.stride, slot.offset) for slot in table.slots[: len(self._names)]
            ]
            self._feedback.move(self._names, self._views)
        for tail in table.slots[len(self._names) :]:
            self._flat[tail.offset :].zero_()
        self._kept = {}
        if missing:
            views = zip(self._indices, self._views, strict=True)
            self._kept = {index: view.clone() for index, view in views if index in missing}
        return self._flat

    def part(self, rank: int, size: int) -> Tensor | None:
        """The part of a rank that adds up one, [numel / size]; None of a buffer that is sent empty."""
        packed, self._packed = self._packed, False
        return self._flat.view(size, -1)[rank] if packed and self._flat is not None else None

    def take_back(self, untouched: Collection[int]) -> None:
        """Of these parameters no rank had a gradient, so what was sent reached nobody."""
        for index, view in zip(self._indices, self._views, strict=True):
            if index in untouched and index in self._kept:
                view.copy_(self._kept[index])
