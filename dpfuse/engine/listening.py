"""Tells the reducer of a model of backwards, and a recorder of ready gradients. Knows no gradient."""

from __future__ import annotations

from collections.abc import Callable

from dpfuse.engine.autograd import BackwardListener, BackwardWatch, ReadyHooks
from dpfuse.engine.events import Events, Watcher
from dpfuse.engine.feature import Engine
from dpfuse.engine.ready import ReadyHook

__all__ = ["Listening", "ReadyRecorder", "Wrap"]

Wrap = Callable[[BackwardListener], BackwardListener]  # returns what is told of backwards, and tells its argument


class ReadyRecorder(Watcher):
    """A watcher that notes also when each gradient is ready."""

    def join(self, engine: Engine) -> None:
        """Take the engine."""
        raise NotImplementedError

    def stamped(self, index: int, hook: ReadyHook) -> ReadyHook:
        """Return a ready hook that notes the time, then calls `hook`."""
        raise NotImplementedError


class Listening:
    """Tells a reducer of backwards, and puts the ready hooks on the parameters.

    Args:
        watch: tells when a backward begins and ends.
        events: of the model, of which a recorder and what measures communication are told.
        alone: whether another wrapper of the same parameters would break what this one does.
        wrap: puts a listener of the face in front of the reducer.

    Attributes:
        watch: as given.
        hooks: the ready hooks on the parameters.
        recorder: notes when gradients are ready, if there is one.
    """

    def __init__(self, watch: BackwardWatch, events: Events, *, alone: bool, wrap: Wrap) -> None:
        self.watch = watch
        self.recorder: ReadyRecorder | None = None
        self._events = events
        self._times: Watcher | None = None
        self._wrap = wrap
        self.hooks = ReadyHooks(alone, self._decorated)

    def tell(self, reducer: BackwardListener) -> None:
        """Tell this reducer of backwards, through what the face puts in front of it."""
        self.watch.listener = self._wrap(reducer)

    def record(self, recorder: ReadyRecorder | None) -> None:
        """Let `recorder` watch; None ends that. The ready hooks are to be installed again."""
        self._events.exchange(self.recorder, recorder)
        self.recorder = recorder

    def observe(self, times: Watcher | None) -> None:
        """Let `times` watch, besides a recorder; None ends that."""
        self._events.exchange(self._times, times)
        self._times = times

    def _decorated(self, index: int, hook: ReadyHook) -> ReadyHook:
        return hook if self.recorder is None else self.recorder.stamped(index, hook)
