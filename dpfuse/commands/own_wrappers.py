"""Programs that use dpfuse's classes already: who hears of each wrapper, and what torch's class would get for it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from torch import nn

from dpfuse.comm.collective import resolve_group
from dpfuse.data_parallel import DataParallel
from dpfuse.ddp.distributed_data_parallel import DistributedDataParallel
from dpfuse.ddp.patch import Patch

__all__ = ["FACES", "changes_numbers", "for_torch", "hear_constructors"]

FACES: tuple[Any, ...] = (DataParallel, DistributedDataParallel)
Constructed = Callable[[Callable[..., None], Any, bool, Sequence[Any], Mapping[str, Any]], None]
TORCH_SIGNATURE = inspect.signature(nn.parallel.DistributedDataParallel)
BUFFERS = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in TORCH_SIGNATURE.parameters)
NUMERIC = (  # what torch's class does not have, and what changes the numbers
    "wire_dtype", "error_feedback", "deterministic", "fixed_micro_batches", "accumulate_in_buckets", "gradient_scale",
)  # fmt: skip


def hear_constructors(constructed: Constructed) -> None:
    """From here on a function runs in the place of the constructors of dpfuse's classes.

    Args:
        constructed: gets the constructor, the wrapper, whether the program has written dpfuse's class itself, and not
            `patch()` in the place of torch's, and the arguments.
    """
    for face in FACES:
        _hear(face, face.__init__, constructed)


def _hear(face: Any, plain: Callable[..., None], constructed: Constructed) -> None:
    @wraps(plain)
    def construct(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        is_own = sys._getframe(1).f_globals.get("__name__") != Patch.__module__
        constructed(plain, wrapper, is_own, args, kwargs)

    face.__init__ = construct


def for_torch(plain: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that torch's class gets where the program has given these to one of ours.

    Args:
        plain: the constructor of our class.
        args, kwargs: its arguments, without the wrapper.
    """
    bound = inspect.signature(plain).bind(None, *args, **kwargs)
    if "layers" not in bound.signature.parameters:
        return {name: value for name, value in bound.arguments.items() if name in TORCH_SIGNATURE.parameters}
    bound.apply_defaults()
    given = bound.arguments
    return {
        "module": given["layers"],
        "process_group": resolve_group(given["group"]),
        "find_unused_parameters": given["find_unused_parameters"],
        "gradient_as_bucket_view": given["gradient_as_bucket_view"],
        BUFFERS: given["broadcast_buffers"],
        **({} if given["comm_buffer_size"] is None else {"bucket_cap_mb": given["comm_buffer_size"]}),
    }


def changes_numbers(kwargs: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that torch's class does not have, and with which numbers are others."""
    return [name for name in NUMERIC if kwargs.get(name)]
