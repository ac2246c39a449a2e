"""Communication hooks, for `dpfuse.DistributedDataParallel` and for torch's own. Knows only the bucket it is given."""

# No `from __future__ import annotations`: torch compares the annotations of a hook with types, not with their names.
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from dpfuse.comm import collective

__all__ = ["fused_bf16", "fused_fp16"]


def fused_bf16(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of gradients that travel as bfloat16: torch's `bf16_compress_hook`, one pass shorter and any back end.

    Gradients are divided by the number of ranks and rounded in one pass over memory, in this order, so that
    no number is rounded twice.

    Args:
        state: the process group; None is the default group.
        bucket: of dense gradients.

    Returns:
        The future of the bucket's buffer.

    Raises:
        TypeError: the bucket is sparse.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from dpfuse.hooks import fused_bf16
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> model.register_comm_hook(None, fused_bf16)
        >>> model(torch.full((3, 4), 0.1)).sum().backward()
        >>> model.module.weight.grad[0, 0].item()
        0.30078125
        >>> del model  # before its group: its reducer holds the GIL while it waits for gloo's threads, which need it
        >>> dist.destroy_process_group()
    """
    return _mean(state, bucket, torch.bfloat16)


def fused_fp16(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of gradients that travel as float16: torch's `fp16_compress_hook`, one pass shorter.

    Dividing before rounding, a gradient overflows only where its share of the mean does. Arguments, result and
    errors are those of `fused_bf16`.
    """
    return _mean(state, bucket, torch.float16)


def _mean(state: dist.ProcessGroup | None, bucket: GradBucket, wire: torch.dtype) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        raise TypeError(
            f"bucket {bucket.index()} has a gradient of layout {buffer.layout}, expected dense gradients. Use an "
            "embedding with sparse=False, or torch's allreduce_hook."
        )
    group = collective.resolve_group(state)
    if group is None:
        raise ValueError("there is no process group; call torch.distributed.init_process_group() first")
    sent = torch.empty_like(buffer, dtype=wire)
    torch.mul(buffer, 1 / group.size(), out=sent)  # computed in the buffer's dtype, rounded on the way out
    future = collective.all_reduce(sent, group).get_future()
    # The future's own value, not `sent`: on CUDA it is ordered after the collective.
    return cast("torch.futures.Future[Tensor]", future.then(lambda landed: buffer.copy_(landed.value()[0])))
