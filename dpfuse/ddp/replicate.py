"""replicate(): the module itself averages its gradients, without a wrapper around it. Its class changes for that."""

from __future__ import annotations

import copyreg
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dpfuse.arguments import instance
from dpfuse.comm.collective import use_device_of
from dpfuse.comm.votes import report_failure
from dpfuse.ddp.distributed_data_parallel import TORCH_CLASS, DistributedDataParallel
from dpfuse.ddp.placement import group_of
from dpfuse.engine.send_order import complete_failed
from dpfuse.engine.torch_private import leave_untraced
from dpfuse.model.named_params import named_with_ties
from dpfuse.model.options import siblings
from dpfuse.wrapper import SyncedModule

__all__ = ["ReplicatedModule", "replicate"]

Module = TypeVar("Module", bound=nn.Module)
STATE = "_dpfuse_replicated"  # the key in a module's `__dict__`: as an attribute the wrapper would become a child
IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's name for names, which a program may have set
_classes: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass
class _State:
    """What makes a module a replicated one."""

    wrapper: DistributedDataParallel
    options: dict[str, Any]  # of the call that made it
    ignored: frozenset[int]  # parameters that the call left out, by their ids
    running: bool = False  # whether a call of the module is inside the wrapper's forward


class ReplicatedModule(nn.Module):
    """A module after `dpfuse.replicate`. Its class derives from this one and from the class that it had.

    Copies, and what is pickled, are modules of the class that it had, without the averaging.
    """

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module as its own class does, between what the wrapper does before and after a forward."""
        state = _state_of(self)
        if state.running:
            return super().__call__(*inputs, **kwargs)
        state.running = True
        try:
            return state.wrapper(*inputs, **kwargs)
        finally:
            state.running = False

    leave_untraced(__call__)

    @property
    def replicated_by(self) -> DistributedDataParallel:
        """The wrapper that averages: for `no_sync()`, `grad_norm()`, `metrics()`, and for functions that take one."""
        return _state_of(self).wrapper

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether the backwards of the forwards from now on average gradients, or leave them to a later one.

        Args:
            requires_gradient_sync: False accumulates gradients locally, as `no_sync()`.
            recurse: also for replicated parts of the module.

        Example:
            >>> import dpfuse, torch, torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = dpfuse.replicate(torch.nn.Linear(4, 2))
            >>> for micro in range(3):
            ...     model.set_requires_gradient_sync(micro == 2)
            ...     model(torch.ones(3, 4)).sum().backward()
            >>> model.bias.grad
            tensor([9., 9.])
            >>> dist.destroy_process_group()

        Source: the method of torch's `FSDPModule`, which asks when a backward runs. Here a forward's end decides.
        """
        for module in self.modules() if recurse else (self,):
            if isinstance(module, ReplicatedModule):
                module.replicated_by.require_backward_grad_sync = requires_gradient_sync

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        bare = _class_before(type(self))
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle refuses to have it make another class
            make = object.__new__
        arguments = tuple(bare if one is type(self) else one for one in arguments)
        if rest and isinstance(rest[0], dict):  # a class may have a state of its own
            rest[0] = {key: value for key, value in rest[0].items() if key != STATE}
        return make, arguments, *rest


def replicate(
    module: Module,
    *,
    mesh: DeviceMesh | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    **options: Any,
) -> Module:
    """Let the module itself average its gradients in every backward, without a wrapper around it.

    The module stays the same object, with the same parameters and the same names in its state dict. Its class becomes
    a new one, which derives from `ReplicatedModule` and from the class that it had. Call the module as before.

    Parts may be replicated before the whole, as FSDP2's style has it. A part over the same ranks and with the same
    options gives its parameters to the whole, so that buckets hold parameters of several parts. Any other part keeps
    its own ranks and options, and the whole leaves its parameters alone.

    Args:
        module: the module to train; the same on every rank. It is changed.
        mesh: a 1-D mesh, or a named dimension of a larger one; None is the default group.
        ignored_params: parameters of the module that are not averaged, compared or sent.
        options: further arguments of `DistributedDataParallel`, such as `mixed_precision` or `metrics`. Where no other
            value is given, buffers are sent once, now, and not in each step: `forward_sync_buffers=False`.

    Returns:
        The module.

    Raises:
        TypeError: `module` is not a module, is one whose class cannot change, or is a wrapper already.
        ValueError: it was replicated before; `ignored_params` has one that is none of its parameters.
        RuntimeError, ValueError, TypeError, DPFuseError: as `DistributedDataParallel`.

    Example:
        >>> import dpfuse, torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 2)
        >>> dpfuse.replicate(model) is model
        True
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> model.bias.grad, list(model.state_dict()), type(model).__name__
        (tensor([3., 3.]), ['weight', 'bias'], 'ReplicatedLinear')
        >>> dist.destroy_process_group()

    Source: torch's `replicate` of FSDP2, whose parameters become DTensors. Here they stay what they were.
    """
    if "device_mesh" in options:
        raise TypeError(
            "replicate() got an unexpected keyword argument 'device_mesh', which is one of DistributedDataParallel; "
            "here it is mesh"
        )
    instance("mesh", mesh, (DeviceMesh, NoneType), "a torch.distributed.device_mesh.DeviceMesh", "leave it out")
    group = group_of(options.get("process_group"), mesh)
    complete_failed(group)  # before a failure is told here
    try:
        _check(module)
        use_device_of((param for _, param in module.named_parameters()), group)
        ignored = _ids_of(module, ignored_params)
    except (TypeError, ValueError) as error:
        report_failure(error, group, "the wrapped module")
        raise
    if "broadcast_buffers" not in options:
        options.setdefault("forward_sync_buffers", False)
    parts = [part for part in module.modules() if isinstance(part, ReplicatedModule)]
    joining = [
        part for part in parts if part.replicated_by.process_group is group and _state_of(part).options == options
    ]
    left_out = ignored.union(*(_state_of(part).ignored for part in joining))
    left_out |= {tensor for tensor, part in _innermost(parts).items() if part not in joining}
    with _left_out(module, left_out), _given_up(joining):
        wrapper = DistributedDataParallel(module, device_mesh=mesh, **options)
    module.__dict__[STATE] = _State(wrapper, dict(options), ignored)
    object.__setattr__(module, "__class__", _class_of(type(module)))
    return module


siblings.append(replicate)  # so that a wrapper which gets one of its arguments says so


def _check(module: object) -> None:
    """Raise unless a module of this kind can be replicated."""
    if isinstance(module, ReplicatedModule):
        raise ValueError(
            f"{_class_before(type(module)).__name__} was replicated before, expected a module that was not: its "
            "gradients are averaged already. Leave the second call out"
        )
    if isinstance(module, (SyncedModule, TORCH_CLASS)):
        raise TypeError(
            f"module is a {type(module).__name__}, expected the module inside: each gradient would be averaged twice. "
            "Pass its .module, and do not wrap it"
        )
    if not isinstance(module, nn.Module):
        got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(f"module must be a torch.nn.Module, got {got}; pass one model instance")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"module is a {type(module).__name__}, expected one that TorchScript has not compiled: its class cannot "
            "change. Wrap it with dpfuse.DistributedDataParallel"
        )


def _ids_of(module: nn.Module, ignored: Collection[nn.Parameter]) -> frozenset[int]:
    instance("ignored_params", ignored, Collection, "a list of parameters of the module")
    own = {id(param) for param in module.parameters()}
    strangers = [one for one in ignored if id(one) not in own]
    if strangers:
        raise ValueError(
            f"ignored_params has {len(strangers)} that are no parameters of this {type(module).__name__}, such as a "
            f"{type(strangers[0]).__name__}, expected its own: pass them as they are in module.parameters() now"
        )
    return frozenset(map(id, ignored))


def _state_of(module: nn.Module) -> _State:
    state: _State = module.__dict__[STATE]
    return state


def _innermost(parts: Iterable[ReplicatedModule]) -> dict[int, ReplicatedModule]:
    """Return to which part each tensor belongs, by the tensor's id. The parts come in the order of `modules()`."""
    return {id(tensor): part for part in parts for tensor in (*part.parameters(), *part.buffers())}


@contextmanager
def _left_out(module: nn.Module, ids: Collection[int]) -> Iterator[None]:
    """Have wrappers that the body makes leave these tensors alone, beside those that the program has named."""
    before = module.__dict__.get(IGNORED)
    named = (*named_with_ties(module), *module.named_buffers(remove_duplicate=False))
    names = {name for name, tensor in named if id(tensor) in ids}.union(getattr(module, IGNORED, ()))
    TORCH_CLASS._set_params_and_buffers_to_ignore_for_model(module, sorted(names))
    try:
        yield
    finally:
        del module.__dict__[IGNORED]
        if before is not None:  # a later wrapper, as that of a copy, knows no names but the program's
            module.__dict__[IGNORED] = before


@contextmanager
def _given_up(parts: Iterable[ReplicatedModule]) -> Iterator[None]:
    """Give the parts the classes that they had, and end their wrappers. If the body raises, they are as before."""
    before = [(part, type(part), part.__dict__.pop(STATE)) for part in parts]
    for part, kind, _ in before:
        part.__class__ = _class_before(kind)  # type: ignore[assignment]
    try:
        yield
    except BaseException:
        for part, kind, state in before:
            part.__class__, part.__dict__[STATE] = kind, state
        raise
    for *_, state in before:
        state.wrapper._let_go()


def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _classes:
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _classes[kind] = type(f"Replicated{kind.__name__}", (ReplicatedModule, kind), names)
    return _classes[kind]


def _class_before(kind: type[ReplicatedModule]) -> type[nn.Module]:
    """The class of a module before it was replicated: the second of the two bases of what it has now."""
    bases: tuple[type[nn.Module], ...] = kind.__bases__
    return bases[1]
