"""Average gradients by hand, after any backward: the manual path, for no_sync() and custom autograd functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from dpfuse.engine import votes
from dpfuse.engine.averaging import averaging_for
from dpfuse.engine.buckets.accumulating_bucket import refuse_accumulated
from dpfuse.engine.buckets.kinds import make_buckets
from dpfuse.engine.collective import check_all_to_all, resolve_group
from dpfuse.engine.memory_order import dense_stride
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import MB, plan_groups
from dpfuse.engine.wire import Wire
from dpfuse.errors import DPFuseError

__all__ = ["fused_allreduce_gradients"]

WHAT = "the set of gradients of fused_allreduce_gradients"


def fused_allreduce_gradients(
    parameter_list: Iterable[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    scale: float | None = None,
    bucket_size: int = 128 * MB,
    deterministic: bool = False,
    wire_dtype: torch.dtype | None = None,
    wire_reduce: Literal["ring", "fp32"] | None = None,
) -> None:
    """Average the gradients of `parameter_list` over the ranks, in place, in fused buffers.

    For gradients that were accumulated locally: after `no_sync()`, after custom autograd functions, after
    second-order terms, for modules that are not wrapped at all. Every rank must call it with gradients of
    the same parameters. Frozen parameters and parameters without gradient are skipped.

    Args:
        parameter_list: parameters of any shapes and floating dtypes; a generator is fine, and a parameter
            that occurs twice is averaged once.
        group: process group; None is the default group. Without one, or with one rank, nothing is done.
        scale: factor on each rank's gradient before the sum; None is 1 / number of ranks, the mean; 1.0
            gives the plain sum.
        bucket_size: bytes after which a buffer is closed; a change of dtype closes it too.
        deterministic: True adds up in the order of the ranks, in float32 (float64 for float64), and rounds once: no
            bit depends on `bucket_size`, and all are those of a wrapper with `deterministic=True`.
        wire_dtype: the dtype in which gradients travel, as for `DataParallel`; each keeps its own afterwards.
        wire_reduce: how they are added up there, as for `DataParallel`.

    Raises:
        TypeError: `parameter_list` is not iterable or holds something else than tensors; a gradient is
            sparse or of a dtype that cannot be averaged; `scale` is not a number, `deterministic` no bool.
        ValueError: `scale` is not finite; `bucket_size` is negative; `wire_dtype` or `wire_reduce` cannot be used.
        DPFuseError: the ranks hold different sets of gradients, or the call failed on another rank, or
            `deterministic` or `wire_reduce` needs what the back end lacks, or gradients are where
            `accumulate_in_buckets=True` has put them; raised on every rank, before anything is changed.

    Example:
        >>> import torch, dpfuse
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
        >>> with model.no_sync():
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> dpfuse.fused_allreduce_gradients(model.parameters())
        >>> model.bias.grad
        tensor([3., 3.])
        >>> dist.destroy_process_group()

    Source: Paddle's `fused_allreduce_gradients` and its grouping rule `build_groups`.
    """
    process_group = resolve_group(group)
    if process_group is None or process_group.size() == 1:
        _gradients_of(parameter_list, scale, bucket_size, deterministic)
        Wire.of(wire_dtype, wire_reduce, deterministic=deterministic)
        return
    try:
        params, specs = _gradients_of(parameter_list, scale, bucket_size, deterministic)
        wire = Wire.of(wire_dtype, wire_reduce, deterministic=deterministic)
    except Exception as error:  # the iterable is the user's, and the peers wait whatever it raised
        votes.report_failure(error, process_group, WHAT)
        raise
    lines = [
        f"{spec.name} shape={spec.shape} strides={dense_stride(param)} dtype={spec.dtype}"
        for spec, param in zip(specs, params, strict=True)
    ]
    lines.append(
        f"{len(specs)} gradients, scale={scale}, bucket_size={float(bucket_size)}, deterministic={deterministic}, "
        f"wire_dtype={wire_dtype}, wire_reduce={wire_reduce}"
    )
    remedy = "Call it on every rank with the same parameters, each with a gradient on all ranks or on none."
    votes.agree_on_text("\n".join(lines), process_group, WHAT, remedy)
    for device in dict.fromkeys(param.device for param in params):
        if deterministic:
            check_all_to_all(process_group, device)
        if wire.probe is not None:
            check_all_to_all(process_group, device, *wire.probe)
    plan = plan_groups(specs, bucket_size)
    buckets = make_buckets(plan, params, process_group, scale=scale, wire=wire, deterministic=deterministic)
    for bucket in buckets:
        bucket.launch()
    for bucket in buckets:
        bucket.wait()
    for bucket in buckets:
        if bucket.error is not None:
            raise DPFuseError(
                f"rank {process_group.rank()} could not pack its gradients and sent zeros: {bucket.error}. The other "
                "ranks' results of this call are wrong; stop the job."
            ) from bucket.error
    for bucket in buckets:
        bucket.deliver()
    # Neither kernels nor collectives count as writes, and a wrapper may have measured what was here before.
    increment_version([param.grad for param in params if param.grad is not None])


def _gradients_of(
    parameter_list: Any, scale: Any, bucket_size: Any, deterministic: Any
) -> tuple[list[Tensor], list[ParamSpec]]:
    if not isinstance(parameter_list, Iterable) or isinstance(parameter_list, Tensor):
        raise TypeError(
            f"parameter_list must be an iterable of parameters, got {type(parameter_list).__name__}; "
            "pass model.parameters() or a list"
        )
    if isinstance(bucket_size, bool) or not isinstance(bucket_size, (int, float)):
        raise TypeError(f"bucket_size must be a number of bytes, got {bucket_size!r}; pass for example 128 << 20")
    if not bucket_size >= 0:
        raise ValueError(f"bucket_size must be >= 0 bytes, got {bucket_size!r}; 0 sends every gradient alone")
    if not isinstance(deterministic, bool):
        raise TypeError(
            f"deterministic must be True or False, got {deterministic!r} of type {type(deterministic).__name__}"
        )
    parameter_list = list(parameter_list)
    refuse_accumulated(parameter_list, "fused_allreduce_gradients() was called")
    params: dict[int, Tensor] = {}
    specs: list[ParamSpec] = []
    for index, param in enumerate(parameter_list):
        if not isinstance(param, Tensor):
            raise TypeError(f"parameter_list[{index}] is a {type(param).__name__}; expected a parameter")
        grad = param.grad
        if id(param) in params or not param.requires_grad or grad is None:
            continue
        if grad.layout != torch.strided:
            raise TypeError(
                f"parameter_list[{index}] of shape {tuple(param.shape)} has a {grad.layout} gradient, which cannot "
                "be fused; expected a dense one. Build its embedding with sparse=False."
            )
        params[id(param)] = param
        name = f"parameter_list[{index}]"
        specs.append(ParamSpec(name, tuple(param.shape), str(grad.dtype), str(grad.device)))
        try:
            averaging_for(specs[-1].dtype, 1)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        if any(step == 0 and size > 1 for step, size in zip(grad.stride(), grad.shape, strict=True)):
            # Elements that share memory cannot hold different means.
            param.grad = grad.clone(memory_format=torch.contiguous_format)
    averaging_for("float32", 1, scale)
    return list(params.values()), specs
