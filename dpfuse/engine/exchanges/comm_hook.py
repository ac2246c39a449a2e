"""A user's communication hook: checked, called in order, and never again once it has failed. Sends nothing itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
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

    Raises:
        TypeError, KeyError, ValueError: as torch's `register_comm_hook` does for the same hook.
    """

    def __init__(self, state: Any, hook: Callable[..., Any], rank: int, name: str | None = None) -> None:
        _check(hook)
        self.hook = hook
        self.state = state
        self.name = name or str(getattr(hook, "__qualname__", type(hook).__qualname__))
        self._rank = rank
        self._previous: Future[Any] | None = None
        self._broken = ""

    @classmethod
    def built_in(cls, kind: BuiltinCommHookType, group: dist.ProcessGroup) -> CommHook:
        """Return the hook for one that torch has in C++. The function in Python computes the same bits.

        Raises:
            TypeError: `kind` is none.
        """
        if not isinstance(kind, BuiltinCommHookType):
            raise TypeError(
                f"comm_hook_type must be a torch.distributed.BuiltinCommHookType, got {kind!r} of type "
                f"{type(kind).__name__}; use register_comm_hook() for other hooks"
            )
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        allreduce = kind == BuiltinCommHookType.ALLREDUCE
        hook = default_hooks.allreduce_hook if allreduce else default_hooks.fp16_compress_hook
        return cls(group, hook, group.rank(), str(kind))

    def refused(self, *, option: str | None, recording: bool, backward: str, change: str) -> str:
        """Return why it cannot be registered now, and what to do; "" if it can be.

        Args:
            option: of the wrapper, with which it cannot be combined.
            recording: whether autotune records.
            backward: what is done in it, while one runs.
            change: of the module, which the ranks have not agreed on.
        """
        if option is not None:
            return (
                f"a communication hook was registered with {option}, expected one of the two: {self.name} adds up as "
                f"it likes. Leave {option.partition('=')[0]} out, or register no hook."
            )
        if recording:
            return (
                "a communication hook was registered while autotune records, expected it before the call or once its "
                "tuning is done. With a hook the buckets are no longer tuned."
            )
        if backward:
            return (
                f"a communication hook was registered while a backward is {backward}, expected it between backwards. "
                "Register it right after wrapping."
            )
        if change:
            return (
                f"a communication hook was registered after {change} and before a backward synchronised since. "
                "Register it before the change, or after that backward."
            )
        return ""

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

    def __call__(self, bucket: CommBucket) -> Future[Any]:
        """Call the hook with `bucket`, and return its future.

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
        try:
            with torch.no_grad():
                future = self.hook(self.state, bucket)
        except BaseException as error:
            self._broken = f"raised {type(error).__name__}"
            if hasattr(error, "add_note"):
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


def _check(hook: Callable[..., Any]) -> None:
    if not callable(hook):
        raise TypeError(
            f"Communication hook must be callable. Got {hook!r} of type {type(hook).__name__}; pass a function of "
            "(state, bucket)."
        )
    try:
        signature = inspect.signature(hook, eval_str=True)
    except Exception:  # an annotation that only type checkers can read
        signature = inspect.signature(hook)
    parameter = signature.parameters.get("bucket")
    if parameter is None:
        raise KeyError(
            f"bucket: the second parameter of a communication hook must have this name, got {signature}. Rename it."
        )
    if _contradicts(parameter.annotation, (GradBucket, CommBucket)):
        raise ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket. Got "
            f"{parameter.annotation!r}; correct it, or leave it out."
        )
    if _contradicts(signature.return_annotation, (Future[Tensor],)):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. Got "
            f"{signature.return_annotation!r}; correct it, or leave it out."
        )


def _contradicts(annotation: Any, expected: tuple[Any, ...]) -> bool:
    return annotation is not inspect.Parameter.empty and not isinstance(annotation, str) and annotation not in expected
