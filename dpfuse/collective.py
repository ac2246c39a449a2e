"""The only file that calls a collective. Knows flat tensors and process groups, no parameter and no plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.errors import DPFuseError

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_max",
    "broadcast",
    "broadcast_flat",
    "group_device",
    "resolve_group",
    "start_all_gather",
]

_SUM = dist.AllreduceOptions()
_MAX = dist.AllreduceOptions()
_MAX.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
BROADCAST_BYTES = 250 << 20  # bytes fused into one broadcast, so that a large model needs no second copy of itself


def resolve_group(group: Any) -> dist.ProcessGroup | None:
    """The process group to use: `group` itself, the default group, or None where none was initialised.

    Raises:
        TypeError: `group` is neither None nor a process group.
        DPFuseError: this rank is not a member of `group`.
    """
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise DPFuseError(
            f"rank {dist.get_rank()} is not a member of the group it was given; expected a group that "
            "contains this rank. Build the module only on the ranks of its group."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be None or a torch.distributed.ProcessGroup, got {type(group).__name__}; "
            "pass what torch.distributed.new_group() returned"
        )
    return group


def group_device(group: dist.ProcessGroup) -> torch.device:
    """The device on which small tensors for `group` must live."""
    if any(device.type == "cpu" for device in group._device_types):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def all_reduce(flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the SUM of `flat` over the ranks, in place; the returned work must be waited for.

    The group is called directly: the checks of `dist.all_reduce` cost as much as a small pack, and a
    flat buffer passes them by construction.
    """
    return group.allreduce([flat], _SUM)


def all_reduce_max(values: Tensor, group: dist.ProcessGroup) -> None:
    """The element-wise maximum of `values` over the ranks, in place, finished on return."""
    group.allreduce([values], _MAX).wait()


def all_gather(row: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's `row`, by rank; all rows have the same shape and dtype."""
    rows = [torch.empty_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    return rows


def start_all_gather(row: Tensor, group: dist.ProcessGroup) -> tuple[list[Tensor], dist.Work]:
    """Start `all_gather`: the tensors that it will fill, and the work to wait for."""
    rows = [torch.empty_like(row) for _ in range(group.size())]
    work = dist.all_gather(rows, row, group=group, async_op=True)
    assert work is not None
    return rows, work


def broadcast(tensor: Tensor, group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite `tensor` with that of rank `source` of the group."""
    dist.broadcast(tensor, group=group, group_src=source)


def broadcast_flat(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `tensors` (any dtypes, shapes and strides, one device) with those of the group's rank 0.

    They travel as bytes, many in one broadcast.
    """
    device, batch, nbytes = group_device(group), [], 0
    for tensor in tensors:
        batch.append(tensor)
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= BROADCAST_BYTES:
            _broadcast_batch(batch, group, device)
            batch, nbytes = [], 0
    if batch:
        _broadcast_batch(batch, group, device)


def _broadcast_batch(batch: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in batch:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    flats = [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in by_dtype.values()]
    # Bytes know no dtype: back ends differ in what they can send (bool, complex, float8).
    wire = torch.cat([flat.view(torch.uint8) for flat in flats]).to(device)
    broadcast(wire, group)
    if group.rank() == 0:
        return
    start = 0
    for tensors, flat in zip(by_dtype.values(), flats, strict=True):
        stop = start + flat.numel() * flat.element_size()
        # A dtype's bytes may start anywhere; a copy of their own aligns them.
        arrived = wire[start:stop].clone().view(flat.dtype).to(flat.device)
        pieces = arrived.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(pieces, tensors, strict=True)])
        start = stop
