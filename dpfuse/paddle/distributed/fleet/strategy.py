"""DistributedStrategy: the settings of fleet. Knows no model, no optimizer and no process group."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dpfuse.arguments import flag, integer
from dpfuse.paddle.checks import number
from dpfuse.paddle.distributed.fleet.strategy_fields import INSTEAD, SUPPORTED, UNSUPPORTED
from dpfuse.paddle.static.names import suggestion

__all__ = ["DistributedStrategy"]


class DistributedStrategy:
    """Paddle's settings for distributed training. Those of data parallelism work, in eager mode.

    All of Paddle's fields can be read. The fields that are not listed here accept only their default. A `_configs`
    field takes a dict with some of its keys and keeps the other keys. Values that were read cannot be changed in place,
    so lists are read as tuples.

    Args (fields, with their defaults):
        fuse_grad_size_in_MB (32): a bucket is complete when its gradients reach this many MB (1048576 bytes). 0 and
            fractions are allowed.
        last_comm_group_size_MB (1.0): the same for the bucket that is sent last; above 0.
        fuse_all_reduce_ops (True): False sends every gradient alone.
        find_unused_parameters (False): True if parameters without gradient are expected.
        fp16_allreduce (False): True sends gradients of every dtype except float64 as float16. bfloat16 has a wider
            range: its values overflow above 65504, and become 0 below 3e-8.
        sync_batch_norm (False): True lets BatchNorm layers use mean and variance over all ranks' batches.
        gradient_merge (False), gradient_merge_configs ({"k_steps": 1, "avg": True}): True accumulates the gradients of
            `k_steps` iterations. Only the last of them communicates. Then the optimizer of
            `fleet.distributed_optimizer` steps with their mean (their sum if `avg` is False), and clears them. Clear
            gradients only through that optimizer, and let all optimizers over one model step in every iteration.
        gradient_scale_configs ({"scale_strategy": "avg", "scale_gradient": False}): "avg" takes the mean over the
            ranks, "sum" the sum. "customized" is also the sum: scale the loss yourself. `scale_gradient` sets whether
            Paddle divides before or after merging; the mean is the same.
        a_sync (True): both values are accepted. It belongs to Paddle's parameter servers, and changes nothing here.
        hybrid_configs: `dp_degree` may be -1 or the number of ranks; the other degrees are 1.

    Raises (on assignment):
        ValueError: A value is out of range, or belongs to an unsupported field.
        TypeError: A value has the wrong type.
        AttributeError: There is no such field, or no such key in a `_configs` dict; the nearest name is suggested.

    Example:
        >>> from dpfuse.paddle.distributed import fleet
        >>> strategy = fleet.DistributedStrategy()
        >>> strategy.gradient_merge = True
        >>> strategy.gradient_merge_configs = {"k_steps": 4}
        >>> dict(strategy.gradient_merge_configs)
        {'k_steps': 4, 'avg': True}

    Source: `paddle.distributed.fleet.DistributedStrategy`, and the defaults of its protobuf message.
    """

    a_sync: bool
    fuse_grad_size_in_MB: float  # noqa: N815
    last_comm_group_size_MB: float  # noqa: N815
    fuse_all_reduce_ops: bool
    find_unused_parameters: bool
    fp16_allreduce: bool
    sync_batch_norm: bool
    gradient_merge: bool
    gradient_merge_configs: Mapping[str, Any]
    gradient_scale_configs: Mapping[str, Any]
    hybrid_configs: Mapping[str, Any]

    _values: dict[str, Any]

    def __init__(self) -> None:
        object.__setattr__(self, "_values", copy.deepcopy(SUPPORTED))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is copied, it has no values yet
            raise AttributeError(name)
        value = self._values[name] if name in self._values else _unsupported(name)
        return MappingProxyType(value) if isinstance(value, dict) else value

    def __setattr__(self, name: str, value: Any) -> None:
        check = CHECKS.get(name)
        where = f"strategy.{name}"
        if check is None:
            default = _unsupported(name)
            if isinstance(default, dict):
                given = _known(where, value, default)
                value = {**default, **{key: tuple(one) if isinstance(one, list) else one for key, one in given.items()}}
            if value != default:
                remedy = INSTEAD.get(name.removesuffix("_configs"), "it has no effect on data parallelism here")
                raise ValueError(f"{where} is not supported: got {value!r}, expected {default!r}; {remedy}")
        elif isinstance(check, dict):
            checked = {key: check[key](f"{where}[{key!r}]", item) for key, item in _known(where, value, check).items()}
            self._values[name] = {**self._values[name], **checked}
        else:
            self._values[name] = check(where, value)

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, DistributedStrategy) else NotImplemented

    def __repr__(self) -> str:
        fields = "".join(f"    {name}={value!r},\n" for name, value in self._values.items())
        return f"DistributedStrategy(\n{fields})"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *SUPPORTED, *UNSUPPORTED})


def _unsupported(name: str) -> Any:
    if name not in UNSUPPORTED:
        fields = {field.lower(): field for field in (*SUPPORTED, *UNSUPPORTED)}
        near = difflib.get_close_matches(name.lower(), fields, 1)
        hint = f"; did you mean {fields[near[0]]!r}?" if near else ""
        raise AttributeError(f"DistributedStrategy has no field {name!r}{hint}")
    return UNSUPPORTED[name]


def _known(name: str, value: Any, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, got {value!r} of type {type(value).__name__}")
    for key in value:
        if key not in keys:
            raise AttributeError(f"{name} has no key {key!r}. {suggestion(key, keys)}")
    return value


def _count(name: str, value: Any) -> int:
    return integer(name, value, 1)


def _size(name: str, value: Any) -> Any:
    if math.isnan(number(name, value)) or value < 0:
        raise ValueError(f"{name} must be at least 0, got {value!r}")
    return value


def _positive_size(name: str, value: Any) -> Any:
    if _size(name, value) == 0:
        raise ValueError(f"{name} must be above 0 MB, got {value!r}; fuse_all_reduce_ops=False fuses nothing")
    return value


def _scale_strategy(name: str, value: Any) -> Any:
    if value not in ("avg", "sum", "customized"):
        raise ValueError(f"{name} must be 'avg', 'sum' or 'customized', got {value!r}")
    return value


def _degree(name: str, value: Any) -> Any:
    return value if value == -1 else _count(name, value)


def _one(name: str, value: Any) -> Any:
    if _count(name, value) != 1:
        raise ValueError(f"{name} must be 1, got {value!r}; there is data parallelism only")
    return value


Check = Callable[[str, Any], Any]

CHECKS: dict[str, Check | dict[str, Check]] = {
    "a_sync": flag,
    "fuse_grad_size_in_MB": _size,
    "last_comm_group_size_MB": _positive_size,
    "find_unused_parameters": flag,
    "fuse_all_reduce_ops": flag,
    "fp16_allreduce": flag,
    "sync_batch_norm": flag,
    "gradient_merge": flag,
    "gradient_merge_configs": {"k_steps": _count, "avg": flag},
    "gradient_scale_configs": {"scale_strategy": _scale_strategy, "scale_gradient": flag},
    "hybrid_configs": {name: _degree if name == "dp_degree" else _one for name in SUPPORTED["hybrid_configs"]},
}
