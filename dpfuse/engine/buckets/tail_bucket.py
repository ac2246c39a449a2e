"""The tail on its own, behind buckets that a communication hook reduces: the hook must not touch it. Knows no order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from dpfuse.engine import collective
from dpfuse.engine.averaging import Averaging
from dpfuse.engine.buckets.bucket import BucketState, GradBucket
from dpfuse.engine.comm_hook import CommHook
from dpfuse.engine.plan import Bucket
from dpfuse.engine.report import Tail
from dpfuse.engine.waiting import finish
from dpfuse.engine.window import Canary
from dpfuse.errors import DPFuseError

__all__ = ["TailBucket"]


class TailBucket(GradBucket):
    """A bucket of no gradients that carries the tail, last of all.

    It is sent when the hook has completed all others, not when backward ends: the hook may call collectives
    until then, and may fail until then.

    Args:
        others: the buckets that the hook reduces.
        param_count: number of parameters of the plan.
        group: process group of the wrapper.
        hook: of the wrapper.
        device: that of the gradients.
        canary: of the wrapper.
    """

    tail: Tail

    def __init__(
        self,
        others: Sequence[GradBucket],
        param_count: int,
        group: dist.ProcessGroup,
        *,
        hook: CommHook,
        device: str,
        canary: Canary,
    ) -> None:
        super().__init__(
            Bucket((), 0, "float32", device, (), 0, None),
            (),
            (),
            group,
            averaging=Averaging("float32", 1.0),
            tail=Tail(group.rank(), group.size(), param_count, 1.0, canary),
            label="tail",
        )
        self._others = others
        self._hook = hook
        self._device = torch.device(device)

    def launch(
        self, *, complete: bool = False, unused: Collection[int] = (), failed: bool = False, empty: bool = False
    ) -> None:
        """Note what to tell; arguments as for `GradBucket.launch`.

        Raises:
            DPFuseError: the hook failed earlier.
        """
        self._hook.check()
        self._move(BucketState.FREE, BucketState.FLIGHT)
        self.error = None
        if self.finite is not None and not empty:
            try:
                self.finite.fail()
            except DPFuseError as error:
                self.error = error
        self._report = (list(unused), failed, empty)

    def wait(self) -> None:
        """Tell it, and hear what the others tell."""
        self._move(BucketState.FLIGHT, BucketState.LANDED)
        unused, failed, changed = self._report
        errors = [bucket.error for bucket in (*self._others, self) if bucket.error is not None]
        failed = failed or bool(errors)
        flat = self.tail.source(torch.float32, self._device, unused, failed, changed).clone()
        if self.times is not None:
            self.times.wait_begins(flat)
        try:
            work = collective.all_reduce(flat, self._group)
            if self.times is not None:
                self.times.sent([flat], work, is_last=True)
            finish(work, self._board, self._device_type, last=True)
        except RuntimeError as error:
            named = isinstance(error, DPFuseError) and error.ranks  # the rank that ended, of which the hook knew less
            if errors and not named:
                raise DPFuseError(f"{errors[0]}; then the other ranks could not be told: {error}") from errors[0]
            raise
        if self.times is not None:
            self.times.wait_ends()
        self.tail.landed(flat)

    def deliver(self, untouched: Collection[int] = ()) -> None:
        """Nothing: it has no gradients."""
        self._move(BucketState.LANDED, BucketState.FREE)

    def average_by(self, averaging: Averaging) -> None:
        """Nothing: it has no gradients."""
