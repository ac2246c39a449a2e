"""Which communication hooks can be registered: a user's function, checked as torch checks it, or one of torch's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.futures import Future

from dpfuse.engine.exchanges.comm_bucket import CommBucket
from dpfuse.engine.exchanges.comm_hook import CommHook

__all__ = ["built_in_hook", "checked_hook"]


def checked_hook(state: Any, hook: Callable[..., Any], rank: int) -> CommHook:
    """Return the user's function `hook(state, bucket)`, ready to be called by the engine.

    Raises:
        TypeError, KeyError, ValueError: as torch's `register_comm_hook` does for the same hook.
    """
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
    return CommHook(state, hook, rank)


def built_in_hook(kind: BuiltinCommHookType, group: dist.ProcessGroup) -> CommHook:
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
    return CommHook(group, hook, group.rank(), str(kind))


def _contradicts(annotation: Any, expected: tuple[Any, ...]) -> bool:
    return annotation is not inspect.Parameter.empty and not isinstance(annotation, str) and annotation not in expected
