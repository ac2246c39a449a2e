"""Is the module still the one that was agreed on? Copies of its tables of parameters, compared in C loops."""

from __future__ import annotations

from collections.abc import Collection, Sequence, ValuesView
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpfuse.engine.local_part import is_divided
from dpfuse.engine.param_spec import grad_dtype_of
from dpfuse.engine.torch_private import local_tensor_of
from dpfuse.model.named_params import named_with_ties

__all__ = ["ModelSignature"]

FEW = 4  # parameters of a module up to which each is looked at, as weight and bias are

_requires_grad = attrgetter("requires_grad")


class _Kind(NamedTuple):
    """What of a parameter must not change without a new plan."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    grad_dtype: torch.dtype | None  # of its gradients, see `torch.Tensor.grad_dtype`
    order: tuple[int, ...]  # of the dimensions in memory, the slowest first: gradients travel in that order

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.grad_dtype != self.dtype:
            dtype += f" with gradients of {str(self.grad_dtype).removeprefix('torch.')}"
        order = f" with its dimensions in the order {self.order}" if self.order != tuple(sorted(self.order)) else ""
        return f"{dtype} {tuple(self.shape)} on {self.device}{order}"


class _Known(NamedTuple):
    name: str
    param: nn.Parameter  # held, so that no other can get its id
    trainable: bool  # in the agreed model: whether it has a place in the plan, and frozen or not is no change
    kind: _Kind
    trained: bool = False  # whether it was trainable in an agreed model


class _Agreed(NamedTuple):
    """The model to which a changed one is compared. It keeps no module alive that was removed since."""

    known: dict[int, _Known]
    names: set[str]


class _Look(NamedTuple):
    """What a module was when it was looked at."""

    known: dict[int, _Known]  # its parameters, by id
    names: set[str]  # of them, also the second names of those that occur twice
    frozen: list[nn.Parameter]  # those whose unfreezing must be noticed
    unfrozen: list[nn.Parameter]  # those whose freezing must be noticed: it may undo a change that is not agreed on
    empty: list[dict[str, Any]]  # of each module, the tables that hold nothing: its parameters, its children
    tables: list[dict[str, Any]]  # and those that hold something
    copies: list[dict[str, Any]]  # of the tables
    delicate: Sequence[ValuesView[Any]]  # parameters that may be equal to others, as the tables show them now
    held: list[Any]  # these, as they were
    untold: bool  # whether it may change without a trace: lazy parameters get shapes, modules may equal others
    dense: Sequence[Tensor]  # the parameters that have a shape and an address
    samples: Sequence[Tensor]  # those of which the address is compared: it changes where one changes in place
    addresses: list[int]  # of the samples
    divided: Sequence[Any]  # the DTensors, whose memory is that of another tensor
    locals: list[int]  # the addresses of these


class ModelSignature:
    """What a module's parameters were, and whether they still are.

    `unchanged` costs about 0.05 µs per parameter and child module. A parameter may also change in place, where its
    `.data` is assigned, and has another address then. Of a module with many parameters only the first one is asked
    for its address. What is missed by that is an error of the backward, which cannot pack a gradient of another kind.

    Parameters whose names are `ignored` may change.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module = module
        self._ignored = ignored
        self.moved = False  # whether parameters got new memory of the same kind; for the reader to reset
        self.looks = 0  # how often it was looked at: what was found out since the last time holds while `unchanged`
        self._take_turns = False  # whether parameters that were frozen in a change were unfrozen in another one
        self._accumulated: set[int] = set()  # ids of frozen parameters, of which an open window may have gradients
        self._agreed = _Agreed({}, set())
        self._now = self._look()
        self.agree()

    def agree(self) -> None:
        """What was last looked at is from now on the model that changes are told from."""
        now, kept, before = self._now, self.kept(), self._agreed.known
        self._take_turns = self._take_turns or bool(kept - self._accumulated)
        known = {}
        for key, each in now.known.items():
            trainable = each.trainable or key in kept
            trained = trainable or (key in before and before[key].trained)
            known[key] = each._replace(trainable=trainable, trained=trained)
        self._agreed = _Agreed(known, now.names)
        self._accumulated = set()
        self._let_freeze()

    def _let_freeze(self) -> None:
        """Do not notice that a parameter is frozen, or unfrozen if it has a place in the plan of the agreed model."""
        known = self._agreed.known
        frozen = [param for param in self._now.frozen if not (id(param) in known and known[id(param)].trainable)]
        self._now = self._now._replace(frozen=frozen, unfrozen=[])

    def kept(self) -> set[int]:
        """Return the ids of the parameters, frozen or not, that keep their place in a plan for what was looked at last.

        Parameters that are frozen when the module changes lose their place, so that they do not travel. But some are
        unfrozen again, as where parts of a model take turns. Then all keep it, or each turn would be a change. And
        what an open window has accumulated before they were frozen is still to be averaged.
        """
        known, before = self._now.known, self._agreed.known
        comes_back = (
            each.trainable and key in before and before[key].trained and not before[key].trainable
            for key, each in known.items()
        )
        if not (self._take_turns or any(comes_back)):
            return self._accumulated
        return self._accumulated | {key for key in known if key in before and before[key].trainable}

    def unchanged(self) -> bool:
        """Is everything as it was when it was last looked at? False may be a false alarm."""
        now = self._now
        try:
            # Dictionaries compare values by identity first. Two tensors beside make as many answers as they have
            # elements, which are no truth value, and raise. Delicate ones may be others that are equal.
            if now.untold or any(now.empty) or now.tables != now.copies:
                return False
        except Exception:
            return False
        # A parameter that is still on its way (`dpfuse.sharded`) must not be waited for: its numbers are not read.
        with torch._C.DisableTorchFunctionSubclass():
            addresses = [*map(Tensor.data_ptr, now.samples)]
        return (
            (not now.delicate or all(map(is_, chain.from_iterable(now.delicate), now.held)))
            and (addresses == now.addresses or self._only_moved(now, addresses))
            and (not now.divided or _addresses_inside(now.divided) == now.locals or self._only_moved(now, addresses))
            and not (now.frozen and any(map(_requires_grad, now.frozen)))
            and not (now.unfrozen and not all(map(_requires_grad, now.unfrozen)))
        )

    def _only_moved(self, now: _Look, addresses: list[int]) -> bool:
        """Whether parameters have new memory, and are of the same kind, as where a program assigns new values."""
        with torch._C.DisableTorchFunctionSubclass():
            if any(_kind_of(param) != now.known[id(param)].kind for param in now.dense):
                return False
        self.moved = True
        now.addresses[:] = addresses
        inside = _addresses_inside(now.divided)
        if inside != now.locals:
            now.locals[:] = inside
            self.looks += 1  # what has the local tensors looks again
        return True

    def change(self, *, window_is_open: bool = False) -> str | None:
        """Look, and say in words what differs from the agreed model; None if nothing does.

        A parameter that was frozen or removed since is no change, it just takes no part any more; nor is another
        place for a parameter, or another module without any.

        Args:
            window_is_open: whether gradients were accumulated since the last synchronised backward.
        """
        trained = {key for key, each in self._now.known.items() if each.trainable}
        self._now = self._look()
        if window_is_open:
            frozen = {key for key, each in self._now.known.items() if not each.trainable}
            self._accumulated = (self._accumulated | trained) & frozen
        for key, now in self._now.known.items():
            before = self._agreed.known.get(key)
            if before is None:
                if now.trainable:
                    return f"parameter {now.name!r} was {'replaced' if now.name in self._agreed.names else 'added'}"
            elif not before.trainable:
                if now.trainable:
                    return f"parameter {now.name!r} was unfrozen"
            elif before.kind != now.kind:
                return f"parameter {now.name!r} was converted from {before.kind} to {now.kind}"
        self._let_freeze()
        return None

    def reaches_parameters(self) -> bool:
        """Whether gradients of what is in the parameters' places now may reach parameters of the agreed model."""
        known = self._agreed.known
        return any(
            param.requires_grad and (not param.is_leaf or (id(param) in known and known[id(param)].trainable))
            for param in self._module.parameters()
        )

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Those that train now, and did not when the model was agreed on, by name."""
        return {
            now.name: now.param
            for key, now in self._now.known.items()
            if now.trainable and not ((before := self._agreed.known.get(key)) and before.trainable)
        }

    def _look(self) -> _Look:
        self.looks += 1
        module = self._module
        with torch._C.DisableTorchFunctionSubclass():
            known = {
                id(param): _Known(name, param, param.requires_grad, _kind_of(param))
                for name, param in module.named_parameters()
                # functional_call() lets results stand in for parameters, whose gradients come through these.
                if name not in self._ignored and param.is_leaf
            }
        children = list(module.modules())
        tables: list[dict[str, Any]] = [table for child in children for table in (child._parameters, child._modules)]
        filled = [table for table in tables if table]
        # Each shows what is there whenever it is read; as long as the copies are equal, they are as many.
        values = [child._parameters.values() for child in children]
        delicate = [each for each in values if any(map(_is_delicate, each))]
        dense = [each.param for each in known.values() if _is_strided(each.param)]
        divided = [param for param in dense if is_divided(param)]
        known_ids = set(map(id, dense))
        owned = [[each for each in child._parameters.values() if each is not None] for child in children]
        owned = [[param for param in params if id(param) in known_ids] for params in owned]
        samples = [param for params in owned for param in (params if len(params) <= FEW else params[:1])]
        with torch._C.DisableTorchFunctionSubclass():
            addresses = [*map(Tensor.data_ptr, samples)]
        return _Look(
            known=known,
            names={name for name, _ in named_with_ties(module)},
            frozen=[each.param for each in known.values() if not each.trainable],
            unfrozen=[each.param for each in known.values() if each.trainable],
            empty=[table for table in tables if not table],
            tables=filled,
            copies=[*map(dict, filled)],
            delicate=delicate,
            held=[*chain.from_iterable(delicate)],
            untold=any(map(is_lazy, module.parameters()))
            or any(type(child).__eq__ is not object.__eq__ for child in children),
            dense=dense,
            samples=samples,
            addresses=addresses,
            divided=divided,
            locals=_addresses_inside(divided),
        )


def _addresses_inside(params: Sequence[Any]) -> list[int]:
    return [local_tensor_of(param).data_ptr() for param in params]


def _kind_of(param: Tensor) -> _Kind:
    shape = torch.Size() if is_lazy(param) or param.is_nested else param.shape
    return _Kind(param.dtype, param.device, shape, grad_dtype_of(param), _order_of(param))


def _is_strided(param: Tensor) -> bool:
    """Whether it has a shape and an address, which is 0 where the memory is that of other tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return not is_lazy(param) and param.layout is torch.strided and not param.is_nested


def _is_delicate(param: Tensor | None) -> bool:
    """Whether another tensor may be equal to it: a single element makes one answer, a subclass any."""
    return param is not None and (type(param) not in (nn.Parameter, Tensor) or param.is_nested or param.numel() == 1)


def _order_of(param: Tensor) -> tuple[int, ...]:
    if not _is_strided(param):
        return ()
    strides = param.stride()
    longer = [dim for dim, size in enumerate(param.shape) if size != 1]  # of the others the stride addresses nothing
    return tuple(sorted(longer, key=lambda dim: -strides[dim]))
