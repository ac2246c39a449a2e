"""A user's communication hook reduces the bucket: it gets the communication buffer, and its result is copied back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from datetime import timedelta
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from dpfuse.comm import collective
from dpfuse.comm.completion import call_when_landed
from dpfuse.comm.work import StagedWork
from dpfuse.engine.comm_buffer import PLAIN, CommBuffer
from dpfuse.engine.exchanges.comm_hook import CommHook
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import Exchange, PackStep
from dpfuse.engine.report import Report
from dpfuse.errors import DPFuseError

__all__ = ["AfterHooks", "HookedBuffer", "HookedRows", "Unpadded"]


class Unpadded:
    """A buffer without padding, since a hook may compute something from the whole buffer."""

    def places(self, numels: Sequence[int], room: int, dtype: str) -> tuple[list[int], int]:
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end += numel
        return offsets, end

    table = staticmethod(PLAIN.table)
    pack = staticmethod(PLAIN.pack)
    unpack = staticmethod(PLAIN.unpack)


class HookedBuffer(Exchange):
    """A communication hook reduces the gradients, which are packed unscaled, as torch's hooks expect.

    Args:
        group: the ranks.
        hook: of the wrapper.
        buffer: of the bucket.
        index: place in the order of communication.
        is_last: whether no gradients come after it.
        label: for errors.
    """

    takes_factors = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        hook: CommHook,
        buffer: CommBuffer,
        index: int,
        *,
        is_last: bool,
        label: str,
    ) -> None:
        super().__init__(group)
        self.hook = hook
        self._buffer = buffer
        self._index = index
        self._is_last = is_last
        self._label = label

    def start(self, flat: Tensor) -> dist.Work:
        """As `Exchange.start`: call the hook.

        Raises:
            DPFuseError: the hook failed earlier, or returned no future.
            Exception: what the hook raised.
        """
        # An alias, so that a hook may resize it and the buffer keeps its length.
        return self._call(flat.view(-1), self._buffer.params)

    def landed(self, work: dist.Work) -> None:
        """As `Exchange.landed`: copy the result of the hook's future to the buffer, or set `error`."""
        assert isinstance(work, _HookWork)
        if self._buffer.flat.data_ptr() != self._buffer.table.address:
            self._buffer.follow_flat()  # the hook has resized the buffer and so moved it, as batched PowerSGD does
        self._finish(work)

    def _call(self, buffer: Tensor, params: Sequence[Tensor]) -> _HookWork:
        self.hook.check()
        self.error = None
        return _HookWork(self.hook(self._index, buffer, params, is_last=self._is_last))

    def _finish(self, work: _HookWork) -> None:
        error = work.error
        if error is None:
            try:
                with torch.no_grad():
                    self._put_back(work.result)
                return
            except Exception as refused:
                error = refused
        self.error = DPFuseError(f"the communication hook {self.hook.name} failed for {self._label}: {error}")
        self.error.__cause__ = error

    def _put_back(self, result: Any) -> None:
        flat = self._buffer.flat
        _check_tensor(result)
        if result.numel() != flat.numel():
            raise ValueError(
                f"its future holds a tensor of shape {tuple(result.shape)}, expected {flat.numel()} elements as in "
                "bucket.buffer(). Return the new value of the whole buffer"
            )
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            flat.copy_(result.reshape(-1))


class HookedRows(HookedBuffer):
    """A communication hook reduces one sparse gradient. It gets the sparse tensor itself, as from torch.

    If there is no gradient, the hook gets one without rows.

    Args:
        group, hook, buffer, index, is_last, label: as for `HookedBuffer`.
        planned: the plan of the bucket.
        param: its one parameter.
        name: of the parameter, for errors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hook: CommHook,
        buffer: CommBuffer,
        index: int,
        *,
        is_last: bool,
        label: str,
        planned: Bucket,
        param: Tensor,
        name: str,
    ) -> None:
        super().__init__(group, hook, buffer, index, is_last=is_last, label=label)
        self._registered = planned.params[0]
        self._param = param
        self._name = name
        self._shape = tuple(param.shape)
        self._dtype: torch.dtype = getattr(torch, planned.dtype)
        self._device = torch.device(planned.device)
        self._grad = self._without_rows()

    def take(self, scale: float, steps: Sequence[PackStep], frozen: Set[int]) -> list[int]:
        self.empty(scale)
        grad = None if self._registered in frozen else self._param.grad
        if grad is None:
            return [self._registered]
        if grad.dtype != self._dtype or grad.layout not in (torch.strided, torch.sparse_coo):
            raise ValueError(
                f"parameter {self._name!r} has a gradient of dtype {grad.dtype} and layout {grad.layout}, expected "
                f"{self._dtype} and torch.sparse_coo. Convert it"
            )
        with torch.no_grad():
            self._grad = grad.to_sparse(1) if grad.layout is torch.strided else grad.coalesce()
            for step in steps:
                step.outside([self._name], [self._grad.values()])
        return []

    def empty(self, scale: float) -> None:
        self._grad = self._without_rows()

    def start(self, flat: Tensor) -> dist.Work:
        return self._call(self._grad, [self._param])

    def tensors(self, flat: Tensor) -> list[Tensor]:
        return [self._grad.values()]

    def landed(self, work: dist.Work) -> None:
        assert isinstance(work, _HookWork)
        self._finish(work)

    def deliver(self, untouched: Set[int]) -> None:
        if self._registered not in untouched:
            self._param.grad = self._grad

    def _put_back(self, result: Any) -> None:
        _check_tensor(result)
        if result.shape != self._param.shape:
            raise ValueError(
                f"its future holds a tensor of shape {tuple(result.shape)}, expected {tuple(self._param.shape)} as "
                "bucket.buffer() has"
            )
        self._grad = result.to(self._dtype)
        if result.layout is not torch.strided:
            self._grad = self._grad.coalesce()

    def _without_rows(self) -> Tensor:
        indices = torch.empty(1, 0, dtype=torch.int64, device=self._device)
        values = torch.empty(0, *self._shape[1:], dtype=self._dtype, device=self._device)
        return torch.sparse_coo_tensor(
            indices, values, self._shape, device=self._device, check_invariants=False, is_coalesced=True
        )


class AfterHooks(Exchange):
    """Sends the report after the hook has completed all buckets, since it may call collectives or fail until then.

    Args:
        group: the ranks.
        hook: of the wrapper.
        report: what is sent.
        errors: returns the errors of the hook in this backward.
    """

    takes_factors = False

    def __init__(
        self, group: dist.ProcessGroup, hook: CommHook, report: Report, errors: Callable[[], list[Exception]]
    ) -> None:
        super().__init__(group)
        self._hook = hook
        self._report = report
        self._errors = errors

    def start(self, flat: Tensor) -> dist.Work:
        """As `Exchange.start`: nothing is sent before the work is waited for.

        Raises:
            DPFuseError: the hook failed earlier.
        """
        self._hook.check()
        return StagedWork(self._stages(flat), device=flat.device, late=True, explain=self._explain)

    def _stages(self, flat: Tensor) -> Iterator[dist.Work]:
        if self._errors():
            self._report.write_failure(flat)
        yield collective.all_reduce(flat, self.group)

    def _explain(self, error: RuntimeError) -> Exception:
        errors = self._errors()
        named = (
            isinstance(error, DPFuseError) and error.ranks
        )  # it names the rank that ended, and says more than the hook's error
        if not errors or named:
            return error
        told = DPFuseError(f"{errors[0]}; then the other ranks could not be told: {error}")
        told.__cause__ = errors[0]
        return told


class _HookWork(dist.Work):
    """The future of a hook as a work to wait for. An error is kept, not raised."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future
        self.error: Exception | None = None
        self.result: Any = None
        self._done: Event | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the future. A future itself has no wait with a limit.

        Raises:
            RuntimeError: it took longer than `timeout`.
        """
        if timeout and not self._future.done():
            if self._done is None:
                done = self._done = Event()
                call_when_landed(self, done.set)
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
        """Return the future that the hook returned."""
        return self._future


def _check_tensor(result: Any) -> None:
    if not isinstance(result, Tensor):
        raise TypeError(
            f"its future holds an object of type {type(result).__name__}, expected one tensor. That of a "
            "collective holds a list: add .then(lambda future: future.value()[0])"
        )
