"""`paddle.distributed.fleet.utils.hybrid_parallel_util`: averages gradients by hand, with Paddle's signatures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

import dpfuse

__all__ = ["fused_allreduce_gradients", "fused_allreduce_gradients_with_group"]


def fused_allreduce_gradients(parameter_list: Iterable[Tensor], hcg: Any) -> None:
    """Average the gradients of `parameter_list` over the ranks, in place, in fused buffers.

    Args:
        parameter_list: parameters. Frozen parameters and those without gradient are skipped.
        hcg: None for all ranks, or an object with `get_data_parallel_group()`, which returns the process group.

    Raises:
        TypeError: `hcg` is something else. Also the errors of `dpfuse.fused_allreduce_gradients`.

    Example:
        >>> import torch
        >>> from dpfuse.paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients
        >>> fused_allreduce_gradients(torch.nn.Linear(4, 2).parameters(), None)  # nothing to do on one process

    Source: Paddle's function of this name.
    """
    if hcg is None:
        dpfuse.fused_allreduce_gradients(parameter_list)
        return
    if not hasattr(hcg, "get_data_parallel_group"):
        raise TypeError(
            f"hcg must be None or have a method get_data_parallel_group(), got {type(hcg).__name__}; "
            "fused_allreduce_gradients_with_group takes a process group"
        )
    dpfuse.fused_allreduce_gradients(parameter_list, hcg.get_data_parallel_group())


def fused_allreduce_gradients_with_group(
    parameter_list: Iterable[Tensor],
    group: dist.ProcessGroup | None,
    bucket_size: int = 128 * 1024 * 1024,
    scale: float | None = None,
) -> None:
    """Average gradients over a process group, with a bucket size and a factor.

    Args:
        parameter_list: parameters. Frozen parameters and those without gradient are skipped.
        group: process group; None means the default group.
        bucket_size: a buffer is complete when it has this many bytes, or when the dtype changes.
        scale: factor on each rank's gradient before the sum; None gives the mean, 1.0 the sum.

    Raises:
        The errors of `dpfuse.fused_allreduce_gradients`.

    Source: Paddle's function of this name.
    """
    dpfuse.fused_allreduce_gradients(parameter_list, group, scale=scale, bucket_size=bucket_size)
