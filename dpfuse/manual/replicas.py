"""Average gradients over several copies of a model in one process. Knows no process group and no hook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfuse.engine.averaging import averaging_for, real_dtype
from dpfuse.engine.comm_buffer import dense_stride
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import MB, Bucket
from dpfuse.manual.gradient_spec import spec_of_gradient
from dpfuse.manual.plan import check_bucket_size, plan_in_order
from dpfuse_kernels import PointerTable, Slot, flatten, unflatten

__all__ = ["reduce_replicas"]

REMEDY = "Pass copies of one model, one per device."


@torch.no_grad()
def reduce_replicas(
    replicas: Sequence[torch.nn.Module | Mapping[str, Tensor] | Iterable[Tensor]],
    *,
    scale: float | None = None,
    bucket_size: int = 128 * MB,
) -> None:
    """Average the gradients of corresponding parameters over the replicas, in place, in fused buffers.

    For several devices driven by one process. Every replica's gradients are packed into one buffer per
    bucket on its own device, already scaled; the buffers are added in the order of `replicas`, so that the
    same gradients give the same bits; and every replica gets the sum. With one replica nothing is done.

    A parameter without gradient on some replicas counts as zeros there and gets the mean; one without
    gradient on all replicas is left alone. So are frozen ones.

    Args:
        replicas: one module, or its parameters by name or in a list, per device: the same parameters in the
            same order, of any shapes and floating dtypes. Several replicas may share a device.
        scale: factor on each replica's gradient before the sum; None is 1 / number of replicas, the mean;
            1.0 gives the plain sum.
        bucket_size: bytes after which a buffer is closed; a change of dtype or device closes it too. 0
            moves every gradient alone.

    Raises:
        TypeError: `replicas` is not a sequence of modules or iterables of tensors; a gradient is sparse or
            of a dtype that cannot be averaged; `scale` or `bucket_size` is not a number.
        ValueError: the replicas differ in number, shapes, gradient dtypes or frozen parameters, or share a
            parameter; there are none; `scale` is not finite; `bucket_size` is negative.

    Example:
        >>> import copy, torch, dpfuse
        >>> first = torch.nn.Linear(2, 1)
        >>> second = copy.deepcopy(first)
        >>> first(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> second(torch.tensor([[3.0, 6.0]])).sum().backward()
        >>> dpfuse.reduce_replicas([first, second])
        >>> first.weight.grad
        tensor([[2., 4.]])
        >>> torch.equal(first.weight.grad, second.weight.grad)
        True

    Source: what Paddle's `ParallelExecutor` does between the devices of one process (`fuse_all_reduce_ops`).
    """
    check_bucket_size(bucket_size)
    averaging_for("float32", 1, scale)
    rows = list(_corresponding(_parameters_of(replicas)))
    specs = [_describe(name, row) for name, row in rows]
    if len(replicas) == 1:
        return
    for bucket in plan_in_order(specs, bucket_size).buckets:
        chosen = [rows[index] for index in bucket.params]
        _reduce(bucket, [name for name, _ in chosen], [params for _, params in chosen], scale)


def _parameters_of(replicas: Any) -> list[dict[str, Tensor]]:
    """Per replica its distinct parameters, by the names that errors use."""
    if isinstance(replicas, (Tensor, torch.nn.Module, str)) or not isinstance(replicas, Sequence):
        raise TypeError(
            f"replicas must be a list with one module or one list of parameters per device, got a "
            f"{type(replicas).__name__}; with a single device pass [model]"
        )
    if not replicas:
        raise ValueError(f"replicas is empty; expected one entry per device. {REMEDY}")
    found = []
    for index, replica in enumerate(replicas):
        if isinstance(replica, torch.nn.Module):
            named: Iterable[tuple[Any, Any]] = replica.named_parameters()
        elif isinstance(replica, Mapping):
            named = replica.items()
        elif isinstance(replica, Iterable) and not isinstance(replica, (Tensor, str)):
            named = ((f"parameter {place}", param) for place, param in enumerate(replica))
        else:
            raise TypeError(
                f"replicas[{index}] is a {type(replica).__name__}; expected a module or an iterable of its parameters"
            )
        params: dict[int, tuple[str, Tensor]] = {}
        for name, param in named:
            if not isinstance(param, Tensor):
                raise TypeError(f"replicas[{index}], {name}: got a {type(param).__name__}; expected a parameter")
            params.setdefault(id(param), (name, param))
        found.append(dict(params.values()))
    return found


def _corresponding(replicas: list[dict[str, Tensor]]) -> Iterator[tuple[str, list[Tensor]]]:
    """Name and one tensor per replica, of each parameter that has a gradient to average."""
    first = replicas[0]
    for index, replica in enumerate(replicas):
        if len(replica) != len(first):
            raise ValueError(
                f"replicas[{index}] has {len(replica)} parameters, replicas[0] has {len(first)}; expected the same "
                f"number. {REMEDY}"
            )
    for name, *params in zip(first, *(replica.values() for replica in replicas), strict=True):
        for index, param in enumerate(params[1:], start=1):
            for what, got, expected in (
                ("shape", tuple(param.shape), tuple(params[0].shape)),
                ("requires_grad", param.requires_grad, params[0].requires_grad),
            ):
                if got != expected:
                    raise ValueError(
                        f"{name} has {what} {got} in replicas[{index}] and {expected} in replicas[0]; expected the "
                        f"same. {REMEDY}"
                    )
        if len(set(map(id, params))) < len(params):
            raise ValueError(
                f"{name} is the same tensor in several replicas; expected one of its own in each. {REMEDY}"
            )
        if params[0].requires_grad and any(param.grad is not None for param in params):
            yield name, params


def _describe(name: str, params: list[Tensor]) -> ParamSpec:
    dtypes: dict[str, int] = {}
    for index, param in enumerate(params):
        if param.grad is not None:
            dtypes.setdefault(spec_of_gradient(f"replicas[{index}], {name}", param, param.grad).dtype, index)
    if len(dtypes) > 1:
        (one, index), (other, other_index), *_ = dtypes.items()
        raise ValueError(
            f"{name} has a {other} gradient in replicas[{other_index}] and a {one} one in replicas[{index}]; "
            f"expected the same dtype. {REMEDY}"
        )
    (dtype,) = dtypes
    if dtype != real_dtype(dtype):
        raise TypeError(f"{name}: gradients of dtype {dtype} cannot be averaged between replicas; expected real ones")
    # A bucket has one buffer per replica, so it ends where the device changes on any of them.
    return ParamSpec(name, tuple(params[0].shape), dtype, ", ".join(str(param.device) for param in params))


def _reduce(bucket: Bucket, names: list[str], rows: list[list[Tensor]], scale: float | None) -> None:
    """One bucket: pack on every replica, add up on the first one's device, unpack everywhere."""
    dtype: torch.dtype = getattr(torch, bucket.dtype)
    count = len(rows[0])
    factor = averaging_for(bucket.dtype, count, scale).pre_scale
    slots = [
        Slot(name, slot.offset, tuple(row[0].shape), dense_stride(row[0]))
        for name, slot, row in zip(names, bucket.slots, rows, strict=True)
    ]
    tables = []
    for replica in range(count):
        table = PointerTable(torch.zeros(bucket.numel, dtype=dtype, device=rows[0][replica].device), slots, dtype)
        flatten([row[replica].grad for row in rows], table, scale=factor)
        tables.append(table)
    total = tables[0].flat
    for table in tables[1:]:
        total.add_(table.flat.to(total.device, non_blocking=True))
    for replica, table in enumerate(tables):
        if table.flat is not total:
            table.flat.copy_(total, non_blocking=True)
        for slot, row in zip(slots, rows, strict=True):
            param = row[replica]
            if param.grad is None:
                param.grad = torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device=param.device)
        unflatten(table, [row[replica].grad for row in rows])
