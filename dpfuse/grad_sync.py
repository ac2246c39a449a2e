"""Gradient synchronisation of one module: wires planner, buckets, reducer and engine hooks. No user-facing names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpfuse import agreement, collective
from dpfuse.autograd import BackwardWatch, ReadyHooks
from dpfuse.averaging import WIRES, averaging_for
from dpfuse.bucket import GradBucket
from dpfuse.buckets import make_buckets, make_hooked_buckets
from dpfuse.comm_hook import CommHook
from dpfuse.errors import DPFuseError
from dpfuse.param_spec import describe_parameters
from dpfuse.plan import BucketPlan, plan_buckets, rebuild_plan
from dpfuse.reducer import Phase, Reducer
from dpfuse.signature import ModelSignature
from dpfuse.timing import CommunicationTimes
from dpfuse.version import __version__

__all__ = ["GradSync", "SyncOptions", "agree_on_model", "check_module"]


@dataclass(frozen=True)
class SyncOptions:
    """The wrapper's options; sizes in MB of 1048576 bytes. Their meaning is documented where users pass them."""

    comm_buffer_size: float
    last_comm_buffer_size: float
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    broadcast_buffers: bool
    gradient_scale: float | None = None
    wire_dtype: torch.dtype | None = None
    ignored: frozenset[str] = frozenset()  # parameters and buffers that are nobody's business here, by name
    send_buffers_at_start: bool = True

    def check(self) -> None:
        """Raises TypeError or ValueError for a value that cannot be used; the planner checks the sizes."""
        for name in ("find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")
        try:
            averaging_for("float32", 1, self.gradient_scale)
        except (TypeError, ValueError) as error:
            raise type(error)(f"gradient_{error}") from None  # there the argument is called scale
        if self.gradient_scale is not None and not 1e-6 <= abs(self.gradient_scale) <= 1e6:
            raise ValueError(
                f"gradient_scale must be between 1e-6 and 1e6, or negative likewise, got {self.gradient_scale!r}; "
                "beyond that 16-bit gradients vanish or overflow. Scale the loss, or leave it out for the mean."
            )
        if self.wire_dtype is not None and self.wire_dtype not in map(self._dtype, WIRES):
            raise ValueError(
                f"wire_dtype must be None or one of {', '.join(f'torch.{name}' for name in WIRES)}, got "
                f"{self.wire_dtype!r}; None sends gradients in their own dtype"
            )

    @staticmethod
    def _dtype(name: str) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, name))

    @property
    def wire(self) -> str | None:
        """The name of `wire_dtype`, as plans have it."""
        return None if self.wire_dtype is None else str(self.wire_dtype).removeprefix("torch.")


class GradSync:
    """Averages a module's gradients over a group in every backward that is to synchronise.

    Args:
        module: checked by `check_module`, equal on all ranks.
        plan: its buckets.
        group: process group.
        options: of the wrapper.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        options: SyncOptions,
    ) -> None:
        self.plan = plan
        self.group = group
        named = dict(module.named_parameters())
        self._params = [named[spec.name] for spec in plan.specs]
        self._module = module
        self._options = options
        self.broadcast_buffers = options.broadcast_buffers
        self.source = 0  # the rank whose buffers and ready order all ranks take
        self.before_collectives: Callable[[], None] | None = None  # called in before_forward, once all is well
        self._buffer_dicts = {prefix: child._buffers for prefix, child in module.named_modules()}
        self._buffer_counts: list[int] = []  # what the places below were made for
        self._buffer_places: list[tuple[dict[str, Tensor | None], str]] = []
        self._broadcast = collective.FlatBroadcast((), group)
        self.hook: CommHook | None = None  # what reduces the gradients in our place
        self._marks = [1] * len(self._params)  # how often each parameter becomes ready in a backward
        self._times: CommunicationTimes | None = None
        self._signature = ModelSignature(module, options.ignored)
        self._watch = BackwardWatch()
        indices = {id(param): index for index, param in enumerate(self._params)}
        self.reducer = Reducer(
            self._make_buckets(),
            [spec.name for spec in plan.specs],
            index_of=lambda param: indices[id(param)],
            warn_unused=not options.find_unused_parameters,
            open_backward=self._watch.begin,
            rebuild=self._rebuild,
        )
        self._watch.listener = self.reducer
        self._hooks = ReadyHooks(self._params, self._markers())

    def before_forward(self) -> None:
        """To be called before a forward with gradients enabled.

        Raises:
            DPFuseError: the module's parameters have changed; the last backward was interrupted here only.
        """
        if (change := self._signature.change()) is not None:
            raise DPFuseError(
                f"rank {self.group.rank()}: {change} after the module was wrapped; expected the parameters of "
                "the time of wrapping. Wrap the module again, on every rank."
            )
        if self.reducer.phase is Phase.ABANDONED:
            self.reducer.drain()
        if self.before_collectives is not None:
            self.before_collectives()
        if self.broadcast_buffers:
            self.send_buffers()

    def after_forward(self, outputs: Any) -> None:
        """To be called with the outputs of that forward."""
        watched = self._watch.watch(outputs)
        self.reducer.record_forward(self.reducer.require_sync, outputs_watched=watched)

    def send_buffers(self) -> None:
        """Overwrite the buffers with those of rank `source`."""
        # Looked up each time, since buffers may be added, or replaced by hand or by .to(), at any time.
        counts = list(map(len, self._buffer_dicts.values()))
        if counts != self._buffer_counts:
            self._buffer_counts = counts
            self._buffer_places = [
                (buffers, key)
                for prefix, buffers in self._buffer_dicts.items()
                for key in buffers
                if _joined(prefix, key) not in self._options.ignored
            ]
        buffers = [buffer for place, key in self._buffer_places if (buffer := place.get(key)) is not None]
        if not self._broadcast.fits(buffers):
            self._broadcast = collective.FlatBroadcast(buffers, self.group)
        self._broadcast(self.source)

    def send_model(self, *, buffers: bool) -> None:
        """Overwrite parameters, and buffers if asked to, with those of rank `source`."""
        params, others = _tensors_of(self._module, self._options)
        _send([*params.values(), *(others.values() if buffers else ())], self.group, self.source)

    def average_over(self, rank_count: int) -> None:
        """Divide the sums of the next backwards by this number; a communication hook divides by its own."""
        for bucket in self.reducer.buckets:
            scale, wire = self._options.gradient_scale, self._options.wire
            bucket.average_by(averaging_for(bucket.plan.dtype, rank_count, scale, wire))

    def observe(self, times: CommunicationTimes | None) -> None:
        """Report every bucket's way to `times`, or to nobody."""
        self._times = times
        for bucket in self.reducer.buckets:
            bucket.times = times

    def set_hook(self, hook: CommHook) -> None:
        """Let a communication hook reduce the gradients from the next synchronised backward on.

        Raises:
            RuntimeError: there is one already; a backward is running, or was interrupted.
        """
        if self.hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. Got "
                f"{hook.name} after {self.hook.name}; wrap the module again to change it."
            )
        if self.reducer.phase is not Phase.IDLE:
            raise DPFuseError(
                f"rank {self.group.rank()}: a communication hook was registered while a backward is "
                f"{self.reducer.phase.name}, expected it between backwards. Register it right after wrapping."
            )
        self.hook = hook
        self._use_buckets(self._marks)

    def remove_hooks(self) -> None:
        """Leave the module as if it had never been wrapped."""
        self._hooks.remove()

    def _make_buckets(self) -> list[GradBucket]:
        if self.hook is not None:
            views = self._options.gradient_as_bucket_view
            return make_hooked_buckets(self.plan, self._params, self.group, self.hook, views=views)
        return make_buckets(
            self.plan,
            self._params,
            self.group,
            scale=self._options.gradient_scale,
            wire=self._options.wire,
            views=self._options.gradient_as_bucket_view,
            tail=True,
        )

    def _rebuild(self, order: list[int], marks: list[int]) -> None:
        # Backward is over and everything is averaged, so no bucket is in flight and nothing accumulated
        # waits for the old layout. Gradients that are views keep the old buffers alive until they are freed.
        order, marks = agreement.agree_on_order(order, marks, self.group, self.source)
        self.plan = rebuild_plan(self.plan, order)
        self._use_buckets(marks)

    def _use_buckets(self, marks: list[int]) -> None:
        self._marks = marks
        self.reducer.adopt(self._make_buckets(), marks)
        self.observe(self._times)
        self._hooks.replace(self._markers())

    def _markers(self) -> list[Callable[[Any], None]]:
        markers = self.reducer.markers()
        for marker in markers:
            marker.scales = self._options.gradient_scale is not None  # type: ignore[attr-defined]  # see _check_alone
        return markers


def check_module(module: nn.Module, options: SyncOptions, group: dist.ProcessGroup | None) -> BucketPlan:
    """The plan of a module that can be synchronised.

    Raises:
        TypeError, ValueError: an option, parameter, dtype or device that cannot be used; the text names it.
    """
    options.check()
    if not isinstance(module, nn.Module):
        raise TypeError(f"layers must be a torch.nn.Module, got {type(module).__name__}; pass the model instance")
    params, buffers = _tensors_of(module, options)
    for name, param in params.items():
        _check_data(f"parameter {name!r}", param)
    for name, buffer in buffers.items():
        _check_data(f"buffer {name!r}", buffer)
    trainable = {name: param for name, param in params.items() if param.requires_grad}
    _check_alone(trainable, options)
    if not trainable:
        raise ValueError(
            f"{type(module).__name__} has no parameter with requires_grad=True, so there is nothing to "
            "average; use the module without the wrapper"
        )
    specs = [spec for spec in describe_parameters(module) if spec.name in trainable]
    plan = plan_buckets(specs, options.comm_buffer_size, options.last_comm_buffer_size)
    devices = {str(param.device): name for name, param in reversed(trainable.items())}
    if len(devices) > 1:
        raise ValueError(
            "the parameters are on several devices: "
            + ", ".join(f"{name!r} on {device}" for device, name in devices.items())
            + "; expected one device per process. Move the module to one, or wrap its parts."
        )
    device = next(iter(trainable.values())).device
    if group is not None and all(device.type != usable.type for usable in group._device_types):
        raise ValueError(
            f"the parameters are on {device}, but the {dist.get_backend(group)} group reduces tensors on "
            f"{', '.join(usable.type for usable in group._device_types)}; move the module, or use another "
            "backend (gloo for the CPU, nccl for GPUs)"
        )
    for spec in plan.specs:
        try:
            averaging_for(spec.dtype, 1)
        except TypeError as error:
            raise TypeError(f"parameter {spec.name!r}: {error}") from None
    return plan


def _check_alone(trainable: Mapping[str, nn.Parameter], options: SyncOptions) -> None:
    """Raises ValueError where two wrappers would both reduce a gradient and not both take the mean.

    The mean of means is the mean, so those do no harm; a sum over a sum counts every rank twice.
    """
    for name, param in trainable.items():
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            scales = getattr(hook, "scales", None)
            if scales is not None and (scales or options.gradient_scale is not None):
                raise ValueError(
                    f"parameter {name!r} belongs to another wrapper that is still alive, and one of the two has "
                    "gradient_scale set; expected one wrapper. Delete the old one first."
                )


def _check_data(what: str, tensor: Tensor) -> None:
    """Raises ValueError for a tensor that rank 0's data cannot be written into."""
    if is_lazy(tensor):
        raise ValueError(
            f"{what} is uninitialized (a lazy module); expected a known shape. Run one forward with a sample batch "
            "before wrapping."
        )
    if tensor.is_meta:
        raise ValueError(
            f"{what} is on the meta device; expected data. Use module.to_empty(device=…) and initialise it before "
            "wrapping."
        )
    shared = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    if shared or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{what} is {'expanded' if shared else 'a conjugate or negative view'}, with strides {tensor.stride()}; "
            "expected memory of its own for each element, since rank 0's data is written into it. Register a "
            ".clone(memory_format=torch.contiguous_format) of it, after .resolve_conj() where it is complex."
        )


def agree_on_model(module: nn.Module, plan: BucketPlan, options: SyncOptions, group: dist.ProcessGroup) -> None:
    """Compare module and options over the ranks, then overwrite parameters and buffers with rank 0's.

    Raises:
        DPFuseError: on every rank alike, naming rank and first difference.
    """
    lines = [f"dpfuse {__version__}"]
    for name, value in asdict(options).items():
        # 25 and 25.0 are one size, and a set has no order of its own.
        value = float(value) if type(value) is int else sorted(value) if isinstance(value, frozenset) else value
        lines.append(f"option {name} = {value}")
    lines += [f"parameter {spec.name} has sparse gradients" for spec in plan.specs if spec.sparse]
    first: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if name in options.ignored:
            continue
        if id(param) in first:
            lines.append(f"parameter {name} is tied to {first[id(param)]}")
            continue
        first[id(param)] = name
        lines.append(f"parameter {name} {_facts(param)} requires_grad={param.requires_grad} device={param.device.type}")
    params, buffers = _tensors_of(module, options)
    lines += [f"buffer {name} {_facts(buffer)} device={buffer.device.type}" for name, buffer in buffers.items()]
    agreement.agree_on_text(
        "\n".join(lines), group, "the wrapped module", "Build the same model with the same options everywhere."
    )
    tensors = [*params.values(), *(buffers.values() if options.send_buffers_at_start else ())]
    _send(tensors, group)


def _send(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    with torch.no_grad():
        for device in dict.fromkeys(tensor.device for tensor in tensors):  # in the same order on every rank
            collective.broadcast_flat([tensor for tensor in tensors if tensor.device == device], group, source)


def _tensors_of(module: nn.Module, options: SyncOptions) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Parameters and buffers by name, without those to ignore."""
    params = {name: param for name, param in module.named_parameters() if name not in options.ignored}
    return params, {name: buffer for name, buffer in module.named_buffers() if name not in options.ignored}


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _facts(tensor: Tensor) -> str:
    # The stride of a dimension of one element addresses nothing and may differ.
    stride = tuple(s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"shape={tuple(tensor.shape)} strides={stride} dtype={dtype}"
