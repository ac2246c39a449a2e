"""A user's function that synchronises buffers in place of rank 0's broadcast. Sends nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parallel.distributed import _BufferCommHookLocation

__all__ = ["BufferFutures", "BufferHook"]


class BufferFutures:
    """What buffer hooks have started and a backward is to wait for."""

    def __init__(self) -> None:
        self._pending: list[Any] = []

    def add(self, futures: Any) -> None:
        """Note what a hook returned: futures, or None.

        Raises:
            TypeError: it is something else.
        """
        if futures is None:
            return
        kept = list(futures) if isinstance(futures, Iterable) else None
        if kept is None or not all(hasattr(future, "wait") for future in kept):
            raise TypeError(
                f"a buffer hook must return None or a list of futures, got a {type(futures).__name__}; return for "
                "example [work.get_future()]"
            )
        self._pending += kept

    def wait(self) -> None:
        """Wait for all of them; an exception of one is raised here."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.wait()


class BufferHook:
    """A function `hook(state, named_buffers)`, and whether it is called before or after a forward.

    It may return a list of futures, for which the next backward waits at its end.

    Raises:
        AssertionError: `hook` is not callable.
    """

    def __init__(self, state: Any, hook: Callable[..., Any], location: _BufferCommHookLocation) -> None:
        if not callable(hook):
            raise AssertionError(
                f"hook must be callable, got {type(hook).__name__}; pass a function of (state, named_buffers)"
            )
        self.before_forward = location == _BufferCommHookLocation.PRE_FORWARD
        self._state = state
        self._hook = hook

    def __call__(self, named_buffers: Mapping[str, Tensor]) -> Any:
        """What the hook returns for these buffers."""
        return self._hook(self._state, named_buffers)
