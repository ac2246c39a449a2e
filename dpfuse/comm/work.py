"""A work of several collectives, each of which starts when the one before has landed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from dpfuse.comm.failed import mark
from dpfuse.comm.waiting import NO_LIMIT

__all__ = ["StagedWork", "last_collective"]


class StagedWork(dist.Work):
    """Collectives one after the other, and what this rank computes between them.

    `wait` starts all but the first. If a rank went on as soon as data has landed, collectives of several such works
    would start in an order that differs between ranks.

    Args:
        stages: yields each collective once it has started, and goes on when it was waited for. What it raises there,
            `wait` raises, each time.
        device: of the tensors.
        late: whether the first one, too, starts when it is waited for; else it starts now.
        explain: returns what to raise for the error of a collective; None raises the error itself.
    """

    def __init__(
        self,
        stages: Iterator[dist.Work],
        count: int = 1,
        *,
        device: torch.device | None = None,
        late: bool = False,
        explain: Callable[[RuntimeError], Exception] | None = None,
    ) -> None:
        super().__init__()
        self._stages = stages
        self._to_start = count
        self._explain = explain
        self._work: dist.Work | None = None  # that runs
        self._error: Exception | None = None  # of what was computed
        self._future: Future[Any] = Future()
        self._device = device
        self._ended: torch.cuda.Event | None = None  # what the stream of the wait has queued that ended this work
        if late:
            return
        try:
            self._start_next()
        except BaseException as error:
            if self._work is not None:
                mark(error)  # it has begun
            raise

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for all collectives, for each at most `timeout`; it can be called again if that was too short.

        On CUDA each call orders the current stream after them, also after a wait on another stream.

        Raises:
            RuntimeError: it took longer; or a collective failed, and then `is_completed` is true.
            Exception: what the computation between collectives raised.
        """
        if self._future.done() and self._ended is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ended)
        while not self._future.done():
            if self._work is not None:
                self._wait_for(self._work, timeout)
            self._go_on()
        if self._error is not None:
            raise self._error
        if self._device is not None and self._device.type == "cuda" and self._ended is None:
            self._ended = torch.cuda.current_stream(self._device).record_event()
        return True

    @property
    def last(self) -> dist.Work | None:
        """The last of the collectives; None if it has not started. To wait for it does nothing for this work."""
        return None if self._to_start else self._work

    def is_completed(self) -> bool:
        """Whether a wait returns or raises at once."""
        if self._work is None or self._future.done():
            return self._future.done()
        if not self._work.is_completed():
            return False
        if not self._to_start:
            return True
        try:
            self._work.wait(NO_LIMIT)
        except RuntimeError:
            return True
        return False

    def get_future(self) -> Future[Any]:
        """Return a future that is done when this work was waited for."""
        return self._future

    def go_on_on(self, stream: torch.cuda.Stream) -> None:
        """Queue all that follows the first collective on this stream, on which a wait takes no time of the CPU."""
        with torch.cuda.stream(stream):
            while self._to_start:
                assert self._work is not None
                self._work.wait(NO_LIMIT)
                self._start_next()

    def _wait_for(self, work: dist.Work, timeout: timedelta) -> None:
        try:
            work.wait(timeout)
        except RuntimeError as error:
            if self._explain is None or not work.is_completed():
                raise
            told = self._explained(error)
            if told is error:
                raise
            raise told from error

    def _go_on(self) -> None:
        try:
            if self._to_start:
                self._start_next()
                return
            next(self._stages, None)  # what is to be done after the last one
        except Exception as error:
            self._error = self._explained(error)
        self._future.set_result([])

    def _explained(self, error: Exception) -> Exception:
        """Return what to raise for an error, which stays its cause: that tells that a collective has failed."""
        if self._explain is None or not isinstance(error, RuntimeError):
            return error
        told = self._explain(error)
        if told is not error:
            told.__cause__ = error
        return told

    def _start_next(self) -> None:
        try:
            self._work = next(self._stages)
        except BaseException as error:
            if not isinstance(error, Exception):
                mark(error)  # no later call can go on where an interrupt has struck
            raise
        self._to_start -= 1


def last_collective(work: dist.Work) -> dist.Work | None:
    """Return the collective that ends `work`; None if it has not started.

    A measurement waits for this one. A wait for `work` itself may also start stages and copy results, on the stream of
    the measurement.
    """
    found: dist.Work | None = getattr(work, "last", work)
    return found
