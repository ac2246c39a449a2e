"""A user's communication hook: called in order, and never again once it has failed. Sends nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor
from torch.futures import Future

from dpfuse.engine.exchanges.comm_bucket import CommBucket
from dpfuse.errors import DPFuseError

__all__ = ["CommHook"]


class CommHook:
    """A function `hook(state, bucket)` that communicates a bucket and returns a future of the result.

    Args:
        state: what it is called with.
        hook: the function, or another callable.
        rank: of this process, for errors.
        name: its name in errors and logs; None takes the function's own.
    """

    def __init__(self, state: Any, hook: Callable[..., Any], rank: int, name: str | None = None) -> None:
        self.hook = hook
        self.state = state
        self.name = name or str(getattr(hook, "__qualname__", type(hook).__qualname__))
        self._rank = rank
        self._previous: Future[Any] | None = None
        self._broken = ""

    def check(self) -> None:
        """Raise if the hook has failed before; to be called before any collective that follows it.

        Raises:
            DPFuseError: the hook has failed before, so it is unknown in which collective the peers wait.
        """
        if self._broken:
            raise DPFuseError(
                f"rank {self._rank}: the communication hook {self.name} {self._broken} in an earlier backward, "
                "after which the collectives of the ranks may not fit together any more. Delete this wrapper and "
                "wrap the module again, on every rank, or restart the job."
            )

    def __call__(self, index: int, buffer: Tensor, params: Sequence[Tensor], *, is_last: bool) -> Future[Any]:
        """Call the hook with a bucket, and return its future.

        Args:
            index, buffer, params, is_last: as for `CommBucket`.

        Raises:
            DPFuseError: the hook returned something else.
            Exception: what the hook raised.
        """
        # Callbacks of futures run in threads of the back end. Those of the bucket before may call collectives
        # (PowerSGD's do), which must not mix with the next one's in an order that differs from rank to rank.
        if self._previous is not None and not self._previous.done():
            with suppress(Exception):
                self._previous.wait()
        self._previous = None
        bucket = CommBucket(index, buffer, params, is_last=is_last)
        try:
            with torch.no_grad():
                future = self.hook(self.state, bucket)
        except BaseException as error:
            self._broken = f"raised {type(error).__name__}"
            if hasattr(error, "add_note"):
                with suppress(Exception):  # its class may forbid attributes
                    error.add_note(f"rank {self._rank}: raised by the communication hook {self.name} for {bucket!r}")
            raise
        if not isinstance(future, torch._C.Future):
            self._broken = f"returned an object of type {type(future).__name__}"
            raise DPFuseError(
                "DDP communication hook's callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__} from {self.name} on rank {self._rank}. Return what .get_future().then(…) "
                "gave, or set the result of a torch.futures.Future()."
            )
        self._previous = cast("Future[Any]", future)
        return self._previous
