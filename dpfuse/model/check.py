"""Can a module be synchronised, and what is it, in words? Checks and describes; sends nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from dpfuse.comm.abilities import backend_of
from dpfuse.engine.autograd import hooks_on
from dpfuse.engine.averaging import averaging_for
from dpfuse.engine.inner_tensors import attributes_of, inner_tensors, memory_of, readable_parts
from dpfuse.engine.local_part import leaf_of, local_of
from dpfuse.engine.param_spec import describe_parameters, grad_dtype_of
from dpfuse.engine.plan import DEFAULT_SIZE, BucketPlan, plan_buckets
from dpfuse.engine.tensor_hash import hash_of, joined
from dpfuse.engine.user_line import warn_at_user
from dpfuse.model.divided import check_divided, words_of_division
from dpfuse.model.named_params import named_with_ties
from dpfuse.model.plan_file import fitted, given_plan, plan_digest
from dpfuse.version import __version__

if TYPE_CHECKING:
    from dpfuse.model.options import SyncOptions

__all__ = [
    "bits_of",
    "check_module",
    "describe_attributes",
    "describe_buffers",
    "describe_model",
    "describe_options",
    "hashes_of_attributes",
    "memory_facts",
    "named_kinds",
    "tensors_of",
]


def check_module(
    module: nn.Module,
    options: SyncOptions,
    group: dist.ProcessGroup | None,
    ours: Collection[int] = (),
    kept: Collection[int] = (),
) -> BucketPlan:
    """The plan of a module that can be synchronised.

    Args:
        ours: ids of parameters on which the wrapper has hooks already.
        kept: ids of parameters that have a place in the plan though they may be frozen.

    Raises:
        TypeError, ValueError: an option, parameter, dtype or device that cannot be used; the text names it.
    """
    options.check()
    if not isinstance(module, nn.Module):
        got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(f"layers must be a torch.nn.Module, got {got}; pass the model instance")
    params, buffers = tensors_of(module, options)
    for name, param in params.items():
        if not param.is_leaf:
            raise ValueError(
                f"parameter {name!r} is the result of a computation, as functional_call() puts it there; expected a "
                "leaf, which accumulates gradients. Wrap the module outside of functional_call()."
            )
        _check_data(f"parameter {name!r}", param, trains=param.requires_grad)
    for name, buffer in buffers.items():
        _check_data(f"buffer {name!r}", buffer)
    check_divided({**params, **buffers}, options, group)
    trainable = {name: param for name, param in params.items() if param.requires_grad or id(leaf_of(param)) in kept}
    leaves = {name: leaf_of(param) for name, param in trainable.items()}
    _check_alone({name: leaf for name, leaf in leaves.items() if id(leaf) not in ours}, options)
    if not trainable:
        raise ValueError(
            f"{type(module).__name__} has no parameter with requires_grad=True, expected at least one: there is "
            "nothing to average. Use the module without the wrapper"
        )
    _check_grad_dtypes(trainable)
    specs = [spec for spec in describe_parameters(module, kept=kept) if spec.name in trainable]
    ramp_ranks = group.size() if group is not None and options.common["plan"] in ("ramp", "auto") else 0
    size = options.comm_buffer_size
    rule = replace(options.rule, ramp_ranks=ramp_ranks, grows=size is None)
    size = DEFAULT_SIZE if size is None else size
    plan = plan_buckets(specs, size, options.last_comm_buffer_size, rule=rule)
    plan = _given(options, plan, changed=bool(ours))
    devices = {str(param.device): name for name, param in reversed(trainable.items())}
    if len(devices) > 1:
        raise ValueError(
            "the parameters are on several devices: "
            + ", ".join(f"{name!r} on {device}" for device, name in devices.items())
            + "; expected one device per process. Move the module to one, or wrap its parts."
        )
    device = next(iter(trainable.values())).device
    usable = [] if group is None else [each.type for each in group._device_types]  # none of a group written in Python
    if group is not None and usable and device.type not in usable:
        raise ValueError(
            f"the parameters are on {device}, but the {backend_of(group)} group reduces tensors on "
            f"{', '.join(usable)}; move the module, or use another "
            "backend (gloo for the CPU, nccl for GPUs)"
        )
    for spec in plan.specs:
        try:
            averaging_for(spec.dtype, 1)
        except TypeError as error:
            raise TypeError(f"parameter {spec.name!r}: {error}") from None
        if spec.sparse and spec.dtype.startswith("complex"):
            raise TypeError(
                f"parameter {spec.name!r} has sparse gradients of dtype {spec.dtype}; expected real ones. Build its "
                "embedding with sparse=False."
            )
    if (count := options.micro_batches) is not None and group is not None:
        _check_micro_batches(module, count, plan, group)
    return plan


def _given(options: SyncOptions, by_rule: BucketPlan, *, changed: bool) -> BucketPlan:
    """The plan that the user gave, if there is one.

    Raises:
        ValueError: it is of another model. A model that has changed since it was wrapped only warns of that.
    """
    given = given_plan(options.common["plan"])
    if given is None:
        return by_rule
    try:
        return fitted(given, by_rule.specs)
    except ValueError as error:
        if not changed:
            raise
        warn_at_user(f"the module has changed, so its buckets are made by the rule again: {error}")
        return by_rule


def _check_grad_dtypes(trainable: Mapping[str, nn.Parameter]) -> None:
    for name, param in trainable.items():
        if grad_dtype_of(param) is None:
            raise ValueError(
                f"parameter {name!r} has grad_dtype=None, so its gradients may have any dtype; expected one dtype, for "
                f"which there is memory. Set {name}.grad_dtype to that of its gradients, such as torch.float32."
            )


def _check_alone(trainable: Mapping[str, nn.Parameter], options: SyncOptions) -> None:
    """Raises ValueError where two wrappers would both reduce a gradient, and one of them spoils what the other does.

    The mean of means is the mean, so those do no harm. A sum over a sum counts every rank twice. What one has taken
    into its buckets is missing in `.grad` for the other.
    """
    for name, param in trainable.items():
        for other in hooks_on(param):
            if other.alone or options.wants_params_alone:
                raise ValueError(
                    f"parameter {name!r} belongs to another wrapper that is still alive, and one of the two has "
                    "gradient_scale, accumulate_in_buckets or fixed_micro_batches set; expected one wrapper. Delete "
                    "the old one first."
                )


def _check_data(what: str, tensor: Tensor, *, trains: bool = False) -> None:
    """Raises ValueError for a tensor that rank 0's data cannot be written into, or whose gradients cannot travel."""
    if is_lazy(tensor):
        raise ValueError(
            f"{what} is uninitialized (a lazy module); expected a known shape. Run one forward with a sample batch "
            "before wrapping."
        )
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.is_meta:
            raise ValueError(
                f"{what} is on the meta device; expected data. Use module.to_empty(device=…) and initialise it before "
                "wrapping."
            )
        if trains and (tensor.is_nested or tensor.layout is not torch.strided):
            kind = "is nested" if tensor.is_nested else f"has the layout {tensor.layout}"
            raise ValueError(f"{what} {kind} and has requires_grad=True; expected a dense tensor, or a frozen one.")
    with _named(what, tensor):
        memories = [memory_of(each) for each in (inner_tensors(tensor) or {}).values()]
    for memory in memories:
        shared = any(step == 0 and size > 1 for step, size in zip(memory.stride(), memory.shape, strict=True))
        if shared or memory.is_conj() or memory.is_neg():
            raise ValueError(
                f"{what} is {'expanded' if shared else 'a conjugate or negative view'}, with strides "
                f"{memory.stride()}; expected memory of its own for each element, since rank 0's data is written into "
                "it. Register a .clone(memory_format=torch.contiguous_format) of it, after .resolve_conj() where it "
                "is complex."
            )


def _check_micro_batches(module: nn.Module, count: int, plan: BucketPlan, group: dist.ProcessGroup) -> None:
    """Raise ValueError where a module cannot be trained with a fixed number of micro-batches; the text has a name."""
    begin = f"fixed_micro_batches={count}"
    if count < group.size():
        raise ValueError(
            f"{begin} was passed on {group.size()} ranks, expected at least as many micro-batches as ranks. Make "
            "micro-batches smaller, or start fewer ranks."
        )
    for spec in plan.specs:
        if spec.sparse:
            raise ValueError(
                f"{begin} was passed for the parameter {spec.name!r} with sparse gradients, expected dense ones. Build "
                "its embedding with sparse=False."
            )
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm) or (
            isinstance(layer, _NormBase) and layer.training and layer.running_mean is not None
        ):
            raise ValueError(
                f"{begin} was passed for the {type(layer).__name__} {name!r} in training mode, expected no layer whose "
                "statistics depend on which micro-batches a rank has. Use GroupNorm or LayerNorm, pass "
                "track_running_stats=False, or call eval() of the layer before wrapping."
            )


@contextmanager
def _named(what: str, tensor: Tensor) -> Iterator[None]:
    """Let what the class of a tensor raises inside of this context name the tensor."""
    try:
        yield
    except Exception as error:
        kind = type(tensor).__qualname__
        raise ValueError(
            f"{what}, a {kind}, cannot be read: {type(error).__name__}: {error}. Expected a class whose values can be "
            f"found. Repair {kind}, or leave it out of the module."
        ) from error


def describe_options(options: SyncOptions) -> list[str]:
    """One line for the version, and for each option."""
    lines = [f"dpfuse {__version__}"]
    for name, value in options.facts().items():
        # 25 and 25.0 are one size, and a set has no order of its own.
        value = float(value) if type(value) is int else sorted(value) if isinstance(value, frozenset) else value
        lines.append(f"option {name} = {value}")
    return lines


def describe_model(module: nn.Module, plan: BucketPlan, options: SyncOptions) -> list[str]:
    """One line per parameter; equal on two ranks if and only if their parameters differ at most in values."""
    lines = [f"parameter {spec.name} has sparse gradients" for spec in plan.specs if spec.sparse]
    lines += [f"a given plan of {plan_digest(plan)}"] if plan.tuned else []
    first: dict[int, str] = {}
    for name, param in named_with_ties(module):
        if name in options.ignored:
            continue
        if id(param) in first:
            lines.append(f"parameter {name} is tied to {first[id(param)]}")
            continue
        first[id(param)] = name
        facts = _facts(local_of(param))
        with torch._C.DisableTorchFunctionSubclass():
            facts += f" requires_grad={param.requires_grad} device={param.device.type}"
            differs = param.is_leaf and grad_dtype_of(param) != param.dtype
            grad_dtype = f" grad_dtype={grad_dtype_of(param)}" if differs else ""
            lines.append(f"parameter {name} {facts}{grad_dtype}{words_of_division(param)}")
    return lines


def describe_attributes(named: Mapping[str, Tensor]) -> list[str]:
    """One line with a hash per tensor in an attribute of a tensor whose class has its other values in memory.

    Those are sent, and an attribute is not. Where it differs, the two would make other weights than those of rank 0.
    """
    inside = {name: inner_tensors(tensor) for name, tensor in named.items()}
    sent = {
        memory_of(each).untyped_storage().data_ptr() for inner in inside.values() for each in (inner or {}).values()
    }
    return [
        f"{name}, a {type(named[name]).__qualname__}, has in {path}, which is not sent, values with the hash {number:x}"
        for name, inner in inside.items()
        if inner is not None and "" in inner
        for path, number in hashes_of_attributes(named[name], sent).items()
    ]


def hashes_of_attributes(tensor: Tensor, sent: Collection[int] = ()) -> dict[str, int]:
    """The hash of each tensor in the attributes of one of a class of its own, by the attributes that lead to it.

    Those at the addresses `sent` are left out.
    """
    found: dict[str, int] = {}
    for path, attribute in attributes_of(tensor).items():
        parts = [part for part in readable_parts(attribute) if not part.is_meta]
        if parts and parts[0].untyped_storage().data_ptr() not in sent:
            found[path] = int(joined(bits_of(part) for part in parts))
    return found


def bits_of(memory: Tensor) -> int:
    """The hash of the bits of a tensor with memory."""
    return int(hash_of(memory.detach().cpu()))


def describe_buffers(module: nn.Module, options: SyncOptions, *, saved: bool) -> list[str]:
    """One line per buffer of those that are in the state dict, or of those that are not."""
    unsaved = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in child._non_persistent_buffers_set
    }
    _, buffers = tensors_of(module, options)
    return [
        f"buffer {name} {_facts(buffer)} device={buffer.device.type}"
        for name, buffer in buffers.items()
        if (name not in unsaved) is saved
    ]


def tensors_of(module: nn.Module, options: SyncOptions) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Parameters and buffers by name, without those to ignore; of a DTensor the part of this rank."""
    params = {name: local_of(param) for name, param in module.named_parameters() if name not in options.ignored}
    return params, {name: local_of(buffer) for name, buffer in module.named_buffers() if name not in options.ignored}


def named_kinds(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and buffers by what they are and their names, for messages."""
    return {f"parameter {name!r}": param for name, param in params.items()} | {
        f"buffer {name!r}": buffer for name, buffer in buffers.items()
    }


def _facts(tensor: Tensor) -> str:
    """What must be equal on all ranks for its values to be sent."""
    inner = inner_tensors(tensor)
    if inner is not None:
        return " and ".join(f"{path} {memory_facts(memory_of(each))}".lstrip() for path, each in inner.items())
    with torch._C.DisableTorchFunctionSubclass():
        shape = "" if tensor.is_nested else f" shape={tuple(tensor.shape)}"
        return f"class={type(tensor).__qualname__} layout={tensor.layout}{shape} dtype={tensor.dtype}"


def memory_facts(tensor: Tensor) -> str:
    """What must be equal on all ranks for the values of a tensor with memory to be sent."""
    # The stride of a dimension of one element addresses nothing and may differ.
    stride = tuple(s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"shape={tuple(tensor.shape)} strides={stride} dtype={dtype}"
