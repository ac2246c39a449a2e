"""A bucket whose communication is a user's hook: pack, call the hook, put its result back. Knows no order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from dpfuse.engine.averaging import Averaging, real_dtype
from dpfuse.engine.buckets.bucket import BucketState, GradBucket
from dpfuse.engine.buckets.comm_bucket import CommBucket
from dpfuse.engine.comm_hook import CommHook
from dpfuse.engine.landing import when_landed
from dpfuse.engine.plan import Bucket, Slot
from dpfuse.engine.waiting import finish
from dpfuse.errors import DPFuseError
from dpfuse_kernels import PointerTable

__all__ = ["HookedBucket", "HookedSparseBucket"]


class _HookWork(dist.Work):
    """The future of a hook as the work that a bucket waits for; an error is kept instead of raised."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future
        self.error: Exception | None = None
        self.result: Any = None
        self._done: Event | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the future, which says no more than a work how long it may take.

        Raises:
            RuntimeError: it took longer than `timeout`.
        """
        if timeout and not self._future.done():
            if self._done is None:
                done = self._done = Event()
                when_landed(self, done.set)
            if not self._done.wait(timeout.total_seconds()):
                raise RuntimeError("the hook's future is not done")
        try:
            self.result = self._future.wait()
        except Exception as error:
            self.error = error
        return self.error is None

    def is_completed(self) -> bool:
        """Whether the future is done."""
        return self._future.done()

    def get_future(self) -> Future[Any]:
        """What the hook returned."""
        return self._future


class HookedBucket(GradBucket):
    """Gradients that a communication hook reduces: packed without padding and unscaled, as torch's hooks expect.

    Args:
        bucket: the plan of this bucket.
        params: the parameters, in the order of `bucket.params`.
        names: their names, for errors.
        group: process group of the wrapper.
        hook: of the wrapper.
        index: place in the order of communication.
        is_last: whether no gradients come after it.
        views: whether `.grad` becomes a view of the buffer.
    """

    takes_factors = False

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[Tensor],
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        hook: CommHook,
        index: int,
        is_last: bool,
        views: bool,
    ) -> None:
        averaging = Averaging(real_dtype(bucket.dtype), 1.0)
        super().__init__(bucket, params, names, group, averaging=averaging, views=views, label=f"bucket {index}")
        self._hook = hook
        self._index = index
        self._is_last = is_last

    def launch(
        self, *, complete: bool = False, unused: Collection[int] = (), failed: bool = False, empty: bool = False
    ) -> None:
        """Pack the gradients and call the hook; arguments as for `GradBucket.launch`.

        Raises:
            DPFuseError: the hook failed earlier, or returned no future.
            Exception: what the hook raised.
        """
        self._hook.check()
        super().launch(complete=complete, unused=unused, failed=failed, empty=empty)

    def wait(self) -> None:
        """Wait for the hook's future, and write what it holds to the buffer; `error` says what went wrong."""
        work = self._work
        super().wait()
        assert isinstance(work, _HookWork)
        if self._table is not None and self._table.flat.data_ptr() != self._table.address:
            # The hook has resized the buffer, as batched PowerSGD does, which moved it.
            self._table = PointerTable(self._table.flat, self._table.slots, self._table.dtype)
            self._views = self._gradient_views(self._table)
        self._finish(work)

    def average_by(self, averaging: Averaging) -> None:
        """Nothing: it is the hook that divides."""

    def _start(self, flat: Tensor) -> dist.Work:
        # An alias, so that a hook may resize it and the buffer keeps its length.
        return self._call(flat.view(-1))

    def _call(self, buffer: Tensor) -> _HookWork:
        return _HookWork(self._hook(CommBucket(self._index, buffer, self.params, is_last=self._is_last)))

    def _finish(self, work: _HookWork) -> None:
        error = work.error
        if error is None:
            try:
                with torch.no_grad():
                    self._take(work.result)
                return
            except (ValueError, TypeError, RuntimeError) as refused:
                error = refused
        if self.error is None:
            self.error = DPFuseError(f"the communication hook {self._hook.name} failed for {self._label}: {error}")
            self.error.__cause__ = error

    def _take(self, result: Any) -> None:
        assert self._table is not None
        flat = self._table.flat
        self._check_tensor(result)
        if result.numel() != flat.numel():
            raise ValueError(
                f"its future holds a tensor of shape {tuple(result.shape)}, expected {flat.numel()} elements as in "
                "bucket.buffer(). Return the new value of the whole buffer"
            )
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            flat.copy_(result.reshape(-1))

    def _check_tensor(self, result: Any) -> None:
        if not isinstance(result, Tensor):
            raise TypeError(
                f"its future holds an object of type {type(result).__name__}, expected one tensor. That of a "
                "collective holds a list: add .then(lambda future: future.value()[0])"
            )

    def _places(self) -> tuple[list[Slot], int]:
        # One behind the other: what a hook computes of the whole buffer must not depend on padding.
        slots, numel = [], 0
        for planned in self.plan.slots:
            slots.append(Slot(planned.param, numel, self._width * planned.numel))
            numel += slots[-1].numel
        return slots, numel


class HookedSparseBucket(HookedBucket):
    """One sparse gradient that a communication hook reduces; it gets the sparse tensor itself, as from torch.

    Where there is no gradient, the hook gets one without rows.
    """

    def launch(
        self, *, complete: bool = False, unused: Collection[int] = (), failed: bool = False, empty: bool = False
    ) -> None:
        """Call the hook with the gradient; arguments as for `GradBucket.launch`."""
        self._hook.check()
        self._precede()
        self._move(BucketState.FREE, BucketState.FLIGHT)
        (param,), (name,) = self.params, self._names
        grad = None if empty else param.grad
        self.missing = list(self.plan.params) if grad is None else []
        self.error = None
        self._result = self._without_rows()
        with torch.no_grad():
            if grad is None or grad.dtype != param.dtype or grad.layout not in (torch.strided, torch.sparse_coo):
                if grad is not None:
                    self.error = ValueError(
                        f"parameter {name!r} has a gradient of dtype {grad.dtype} and layout {grad.layout}, expected "
                        f"{param.dtype} and torch.sparse_coo. Convert it"
                    )
                grad = self._without_rows()
            grad = grad.to_sparse(1) if grad.layout is torch.strided else grad.coalesce()
            if self.finite is not None and not empty:
                self.finite.begin()
                self.finite.count(name, grad.values())
                self.finite.settle(())
        self._work = self._call(grad)
        self._sources = [grad]
        if self.times is not None:
            self.times.sent([grad.values()], self._work, is_last=False)

    def wait(self) -> None:
        """Wait for the hook's future; `error` says what went wrong."""
        self._move(BucketState.FLIGHT, BucketState.LANDED)
        work, (grad,) = self._work, self._sources
        assert isinstance(work, _HookWork)
        assert grad is not None
        if self.times is not None:
            self.times.wait_begins(grad)
        finish(work, self._board, self._device_type)
        if self.times is not None:
            self.times.wait_ends()
        self._work = None
        self._finish(work)

    def deliver(self, untouched: Collection[int] = ()) -> None:
        """Make the hook's result the parameter's gradient, unless it is to be left alone."""
        self._move(BucketState.LANDED, BucketState.FREE)
        (param,), (index,) = self.params, self.plan.params
        self._sources = []
        if index not in untouched:
            param.grad = self._result

    def _take(self, result: Any) -> None:
        self._check_tensor(result)
        (param,) = self.params
        if result.shape != param.shape:
            raise ValueError(
                f"its future holds a tensor of shape {tuple(result.shape)}, expected {tuple(param.shape)} as "
                "bucket.buffer() has"
            )
        self._result = result.to(param.dtype)
        if result.layout is not torch.strided:
            self._result = self._result.coalesce()

    def _without_rows(self) -> Tensor:
        ((shape, _),) = self._shapes
        indices = torch.empty(1, 0, dtype=torch.int64, device=self.plan.device)
        values = torch.empty(0, *shape[1:], dtype=getattr(torch, self.plan.dtype), device=self.plan.device)
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=True)
