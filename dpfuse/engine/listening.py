"""Tells the reducer of a model, and a recorder in front of it, of backwards. Knows no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dpfuse.engine.autograd import BackwardListener, BackwardWatch, ReadyHooks
from dpfuse.engine.protocols import BucketObserver
from dpfuse.engine.ready import ReadyHook

__all__ = ["BackwardRecorder", "Listening", "Wrap"]

Wrap = Callable[[BackwardListener], BackwardListener]  # returns what is told of backwards, and tells its argument


class BackwardRecorder(BackwardListener, BucketObserver, Protocol):
    """Is told of backwards in place of the reducer, and tells the reducer."""

    def shadowed(self) -> None:
        """Note that this rank took part in a backward of other ranks."""

    def stamped(self, index: int, hook: ReadyHook) -> ReadyHook:
        """Return a ready hook that notes the time, then calls `hook`."""


class Listening:
    """Tells a reducer, or a recorder in front of it, of backwards.

    Args:
        watch: tells when a backward begins and ends.
        alone: whether another wrapper of the same parameters would break what this one does.
        wrap: puts a listener of the face in front of the reducer.
        always: observers that are told in every backward.

    Attributes:
        watch: as given.
        hooks: the ready hooks on the parameters.
        observers: are told how each bucket travels.
        recorder: is told in place of the reducer, if there is one.
    """

    def __init__(self, watch: BackwardWatch, *, alone: bool, wrap: Wrap, always: Sequence[BucketObserver]) -> None:
        self.watch = watch
        self.observers = list(always)
        self.recorder: BackwardRecorder | None = None
        self._times: BucketObserver | None = None
        self._always = always
        self._wrap = wrap
        self.hooks = ReadyHooks(alone, self._decorated)
        self._listener: BackwardListener | None = None

    def tell(self, reducer: BackwardListener) -> None:
        """Tell this reducer of backwards, through what the face puts in front of it."""
        self._listener = self._wrap(reducer)
        self._connect()

    @property
    def listener(self) -> BackwardListener:
        """The object that is told of backwards if there is no recorder."""
        assert self._listener is not None
        return self._listener

    def record(self, recorder: BackwardRecorder | None) -> None:
        """Tell `recorder` of backwards and of how each bucket travels; None ends the recording."""
        self.recorder = recorder
        self.observe(self._times)
        self._connect()

    def observe(self, times: BucketObserver | None) -> None:
        """Report how each bucket travels to `times`, besides a recorder; None ends that."""
        self._times = times
        self.observers[:] = [observer for observer in (*self._always, times, self.recorder) if observer is not None]

    def _connect(self) -> None:
        self.watch.listener = self._listener if self.recorder is None else self.recorder

    def _decorated(self, index: int, hook: ReadyHook) -> ReadyHook:
        return hook if self.recorder is None else self.recorder.stamped(index, hook)
