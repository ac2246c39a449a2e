"""The shards of all buckets of a model. They follow the buckets when these change."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dpfuse.comm.waiting import READ, STEP
from dpfuse.engine.bucket_set import names_of
from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.number_hash import number_hash
from dpfuse.engine.report_layout import Field
from dpfuse.engine.sync import GradSync
from dpfuse.errors import DPFuseError
from dpfuse.gradients.norm import refuse_running
from dpfuse.model.module_sync import ModuleSync
from dpfuse.sharded.delivery import ShardedDelivery
from dpfuse.sharded.elementwise_shard import ElementwiseShard
from dpfuse.sharded.flat_params import FlatParams, Kind, kind_of, refuse_shared, take, words_of
from dpfuse.sharded.gradient import ShardedGradient
from dpfuse.sharded.groups import ParamGroups, State, settings_of
from dpfuse.sharded.in_backward import InBackward
from dpfuse.sharded.norm import sharded_gradient
from dpfuse.sharded.sharding import Sharding, ShardingInBackward
from dpfuse.sharded.whole_shard import WholeShard

__all__ = ["Shards", "refuse_missing"]

Shard = ElementwiseShard | WholeShard

FAILED = 2**62  # the bit of what ranks compare that says that a step has failed


class Shards:
    """The parameters of a wrapped model, of which each rank updates one part.

    Args:
        groups: the parameter groups; each class was tried out.
        masters: whether 16-bit parameters have float32 copies.
        in_backward: whether parameters are updated while backward runs.
        largest_norm: then, of the gradients; as for `InBackward`.

    Attributes:
        in_backward: lands the buckets, if parameters are updated while backward runs.
    """

    def __init__(
        self,
        sync: ModuleSync,
        groups: ParamGroups,
        *,
        masters: bool = False,
        in_backward: bool = False,
        largest_norm: float | None = None,
    ) -> None:
        self._sync, self._grads, self._group = sync, sync.grads, sync.grads.group
        self._groups = groups
        self._masters = masters
        self._gathers: list[Callable[[], None]] = []  # each waits for parameters that have begun to travel
        self._shards: list[Shard] = []
        # Of parameters that are in no bucket now: state, what of it is divided, and the kind of the parameter then.
        self._aside: dict[Tensor, tuple[State, Collection[str], Kind]] = {}
        self._foreign: list[tuple[int, Tensor]] = []  # parameters that are in no bucket, with the number of the group
        self._settings: list[dict[str, Any]] = []  # of the groups, in the step or backward that runs
        self._failure: BaseException | None = None  # why this rank could not update a part
        self._failures = 0  # how often it could not, since the start or the last load
        device = self._grads.params[0].device
        self.in_backward = InBackward(self._group, self, largest_norm, device) if in_backward else None
        self._sharding = (
            Sharding(sync, self._field())
            if self.in_backward is None
            else ShardingInBackward(sync, self._field(), self.in_backward)
        )
        self._sharding.own(groups)
        self._resets = 0  # a number that tells which states were reset, in any order
        sync.divide(self._sharding)
        self._follow(self._sharding.deliveries())

    def step(self) -> None:
        """Update this rank's part of each bucket, and gather the parts of all ranks."""
        self._take_zeros()
        self._sync.gradients()  # raises if they cannot be used now
        self._find_gradients()
        self._refuse_foreign()
        self._settings = self._groups.settings()
        self._take(self._shards)
        for shard in reversed(self._shards):  # the first layers first
            self._update(shard, [param.grad is not None for param in shard.flat_params.params])
        self._end_step()

    def step_after_backward(self) -> None:
        """As `step`, where backward has updated the parameters."""
        assert self.in_backward is not None
        self.in_backward.refuse_half_updated()
        refuse_running(self._grads.reducer, self._group.rank())
        with self._sharding.telling(STEP):
            owed = self.in_backward.step()
        self._refuse_foreign()
        if not owed:
            self._step_with_zeros()
        for name, param in zip(names_of(self._grads.plan), self._grads.params, strict=True):
            if not (owed and isinstance(param.grad, ShardedGradient)):
                sharded_gradient(name, param, self._group)
        self._end_step()

    def _step_with_zeros(self) -> None:
        """Make the states by a step with gradients of zeros, as torch.distributed.checkpoint asks for."""
        self._settings = self._groups.settings()
        self._take(self._shards)
        for shard in self._shards:
            params = shard.flat_params
            grads = [param.grad for param in params.params if param.grad is not None]
            if grads and all(type(grad) is Tensor and not grad.any() for grad in grads):
                params.delivery.parts[params.number].part.zero_()
                self._update(shard, [param.grad is not None for param in params.params])
                for param in params.params:
                    param.grad = None

    def begin(self) -> None:
        """As that of `Updates`, for each backward that synchronises."""
        self._settings = self._groups.settings()
        now = self._sharding.deliveries()
        changed = {*map(id, now)} != {id(shard.flat_params.delivery) for shard in self._shards}
        if self._grads.reducer.change:  # the ranks will refuse it
            return
        if changed:
            self._follow(now)
        self._take(self._shards)

    def update(self, buffer: CommBuffer, *, sent: bool) -> None:
        """As that of `Updates`, for a bucket that has landed while backward runs."""
        assert self.in_backward is not None
        for shard in self._shards:
            params = shard.flat_params
            if params.delivery.buffer is buffer:
                if sent:
                    self.in_backward.clip(params.delivery.parts[params.number].part)
                    # No rank knows yet which parameters the others have used. Each must be used, or frozen.
                    self._update(shard, [param.requires_grad for param in params.params])
                else:
                    self._gathers.append(params.start_gather())
                    increment_version(params.params)

    def spoil(self, wrong: Tensor) -> None:
        """As that of `Updates`."""
        self.finish()
        for shard in self._shards:
            shard.flat_params.add(torch.where(wrong, math.nan, 0.0))

    def _update(self, shard: Shard, touched: Sequence[bool]) -> None:
        if self._failure is None:
            try:
                shard.step(self._settings, touched)
            except BaseException as error:  # an interrupt, too: it is raised once the peers have this rank's part
                self._fail(error)
        self._gathers.append(shard.flat_params.start_gather())
        # A graph that still needs the old values must not get the new ones.
        increment_version([param for param, each in zip(shard.flat_params.params, touched, strict=True) if each])

    def _take(self, shards: Sequence[Shard]) -> None:
        """Move parameters that a program has changed in place, before any is updated."""
        try:
            take([shard.flat_params for shard in shards])
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Note that this rank cannot update its part. It goes on to gather, since the peers wait for its part."""
        if self._failure is None:
            self._failure = error if self.in_backward is None else _without_frames(error)
            self._failures += 1

    def _end_step(self) -> None:
        failure = self._failure
        now = self._sharding.deliveries()
        buckets_changed = {*map(id, now)} != {id(shard.flat_params.delivery) for shard in self._shards}
        try:
            with self._sharding.telling(STEP):
                self.finish()
        except Exception:
            if failure is None:
                raise  # else the program sees its own error first; that of the group comes again
        if failure is not None:
            self._failure = None
            if not isinstance(failure, Exception):
                raise failure
            raise DPFuseError(
                f"rank {self._group.rank()}: the optimizer has failed to update this rank's part of the parameters, "
                f"expected no error: {type(failure).__name__}: {str(failure).rstrip('.')}. The parameters may be half "
                "updated: load a checkpoint."
            ) from failure
        self._take_settings(self._settings)
        if buckets_changed:
            self._follow(now)

    def stated(self) -> list[Tensor]:
        """Return the parameters that have a state, in the order of the groups; the same on all ranks."""
        found = {id(param) for param in self._aside}
        for shard in self._shards:
            params = enumerate(shard.flat_params.params)
            found.update(id(param) for place, param in params if shard.has_state(place))
        return [param for group in self._groups.groups for param in group["params"] if id(param) in found]

    def forget(self, params: Sequence[Tensor]) -> None:
        """Drop the states of these parameters, as if they had never been updated; to be called on all ranks.

        The ranks compare in the next backward which states were dropped.
        """
        ids = set(map(id, params))
        for number, param in enumerate(param for group in self._groups.groups for param in group["params"]):
            if id(param) in ids:
                self._resets = (self._resets + number_hash((number,))) % 2**63
                self._aside.pop(param, None)
        for shard in self._shards:
            places = {place for place, param in enumerate(shard.flat_params.params) if id(param) in ids}
            if places:
                shard.forget(places)

    def _field(self) -> Field:
        return Field(
            "resets",
            self._number,
            self._words,
            "Each rank has one part of each state: delete entries of optimizer.state, and change parameter groups, on "
            "all ranks, in the same way. After a step that has failed on some ranks, load a checkpoint on all ranks.",
        )

    def _number(self) -> int:
        """Return what all ranks must have in common."""
        facts = self._resets, self._groups.changed(), self._failures
        return number_hash(facts) & ~FAILED | FAILED * bool(self._failures) if any(facts) else 0

    def _words(self, number: int) -> str:
        if not number:
            return "has reset no state of its ShardedOptimizer, and failed in no step"
        if number & FAILED:
            why = f": {self._failure}" if self._failure is not None and number == self._number() else ""
            return f"has failed to update its part of the parameters in a step of its ShardedOptimizer{why}"
        return f"has reset other states of its ShardedOptimizer, or changed its param_groups ({number})"

    def _take_zeros(self) -> None:
        """Take gradients that a program has set to zeros: these need no averaging."""
        for shard in self._shards:
            params = shard.flat_params
            for param, sharded in zip(params.params, params.sharded_gradients, strict=True):
                if type(param.grad) is Tensor and not param.grad.any():
                    sharded.own.zero_()
                    param.grad = sharded

    def finish(self) -> None:
        """As that of `Updates`."""
        while self._gathers:
            self._gathers.pop(0)()

    def full_gradient(self, param: Tensor) -> Tensor | None:
        """Return a copy of the averaged gradient of a parameter, if it has one; to be called on all ranks."""
        grad = sharded_gradient("that was passed", param, self._group)
        self._find_gradients()
        for shard in self._shards:
            params = shard.flat_params
            if grad is not None and params.address == grad.region.address:
                with self._sharding.telling(READ):
                    return params.whole_gradient(next(i for i, own in enumerate(params.params) if own is param))
        return None

    def whole_states(self) -> dict[Tensor, State]:
        """Return the state of each parameter that has one, as the plain optimizer has it; to be called on all ranks."""
        with self._sharding.telling(READ):
            found = {param: state for shard in self._shards for param, state, _ in shard.whole_states() if state}
        found |= {param: state for param, (state, *_) in self._aside.items()}
        return {param: found[param] for group in self._groups.groups for param in group["params"] if param in found}

    def load(self, states: Mapping[Tensor, State]) -> None:
        """Use these states, as the plain optimizer has them, in place of all that there are."""
        if self.in_backward is not None:
            self.in_backward.begin_again()
        self._failure, self._failures, self._resets = None, 0, 0
        like = {key for param, state in states.items() if param.dim() for key in state if _is_like(state[key], param)}
        numbers = {key for param, state in states.items() if param.dim() for key in state}.difference(like) | {"step"}
        self._aside = {
            param: (state, {key for key in state if key not in numbers and _is_like(state[key], param)}, kind_of(param))
            for param, state in states.items()
        }
        for shard in self._shards:
            shard.flat_params.read()
        self._keep_aside(self._shards)

    def _keep_aside(self, shards: Sequence[Shard]) -> None:
        """Let these shards have their parts of the whole states that lie aside, and of nothing else."""
        places = _places_of(shards)
        for param in places.keys() & self._aside.keys():
            shard, place = places[param]
            state, divided, kind = self._aside[param]
            if kind == shard.flat_params.kinds[place]:  # else they will have it when they have followed the buckets
                del self._aside[param]
                shard.keep(place, state, divided)
        for shard in shards:
            shard.use_kept()

    def _find_gradients(self) -> None:
        """Follow the buckets if they have changed before the last backward; to be called on all ranks.

        Raises:
            DPFuseError: the buckets have changed since.
        """
        if self._elsewhere():
            self._follow(self._sharding.used)
        if name := self._elsewhere():
            raise DPFuseError(
                f"rank {self._group.rank()}: got a gradient of parameter {name!r} from before the buckets have "
                "changed, expected one of the last backward. Call zero_grad() and backward() for each step()."
            )

    def _elsewhere(self) -> str:
        """Return the name of a parameter whose gradient lies in no shard; empty if there is none."""
        known = {shard.flat_params.address for shard in self._shards}
        for spec, param in zip(self._grads.plan.specs, self._grads.params, strict=True):
            if isinstance(param.grad, ShardedGradient) and param.grad.region.address not in known:
                return spec.name
        return ""

    def _follow(self, deliveries: Sequence[ShardedDelivery]) -> None:
        """Make shards of these buckets, with the states that there are; to be called on all ranks."""
        refuse_missing(self._grads, self._groups)
        self._refuse_converted()
        try:
            refuse_shared(zip(names_of(self._grads.plan), self._grads.params, strict=True))
        except DPFuseError as error:  # maybe on this rank alone, and below are collectives
            self._fail(error)
        before = {(id(shard.flat_params.delivery.buffer), shard.flat_params.number): shard for shard in self._shards}
        numbers = self._groups.numbers()
        now: list[Shard] = []
        made: list[Shard] = []
        for delivery in deliveries:
            for number in range(len(delivery.regions)):
                shard = before.pop((id(delivery.buffer), number), None)
                if shard is None:
                    made.append(
                        shard := self._shard(FlatParams(delivery, number, self._group, masters=self._masters), numbers)
                    )
                shard.flat_params.delivery = delivery
                now.append(shard)
        places = _places_of(made)
        for old in before.values():
            old.updater.leave(self._group.rank())
            converted = old.flat_params.converted()
            for number, (param, state, divided) in enumerate(old.whole_states()):
                if number in converted:
                    continue  # it has no state, but the float32 copy of what it was
                if param in places:
                    shard, place = places[param]
                    shard.keep(place, state, divided)
                elif state:
                    self._aside[param] = state, divided, old.flat_params.kinds[number]
        self._shards = now
        self._foreign = self._not_in(now)
        self._keep_aside(made)

    def _not_in(self, shards: Sequence[Shard]) -> list[tuple[int, Tensor]]:
        """Return the parameters that are in no bucket now, such as frozen ones, and the numbers of their groups."""
        known = _places_of(shards)
        return [
            (number, param)
            for number, group in enumerate(self._groups.groups)
            for param in group["params"]
            if param not in known
        ]

    def _refuse_foreign(self) -> None:
        """Raise if a parameter has a gradient that the wrapped model has not averaged: no rank would update it."""
        for number, param in self._foreign:
            grad = param.grad
            if grad is None or isinstance(grad, ShardedGradient):
                continue
            if type(grad) is Tensor and grad.layout is torch.strided and not grad.any():
                continue  # torch.distributed.checkpoint makes states by a step with gradients of zeros
            raise DPFuseError(
                f"rank {self._group.rank()}: a parameter of shape {tuple(param.shape)} in parameter group {number} has "
                "a gradient, and the wrapped model does not average it: expected parameters of that model only, since "
                "no other is updated here. Leave it out of params and give it to an optimizer of its own, set its "
                ".grad to None, or make it a part of the model before that is wrapped."
            )

    def _refuse_converted(self) -> None:
        """Raise if a parameter that has a state is of another kind now; all ranks have agreed on the conversion."""
        kinds = [
            (param, params.kinds[place], params.names[place])
            for shard in self._shards
            for params in [shard.flat_params]
            for place, param in enumerate(params.params)
            if shard.has_state(place)
        ]
        kinds += [(param, kind, "that is in no bucket") for param, (_, _, kind) in self._aside.items()]
        for param, kind, name in kinds:
            if kind_of(param) != kind:
                raise DPFuseError(
                    f"rank {self._group.rank()}: parameter {name!r} is {words_of(kind_of(param))}, and its state is "
                    f"that of {words_of(kind)}, expected the same. Delete its entry of optimizer.state on all ranks. "
                    "Or convert the states: call optimizer.load_state_dict(optimizer.state_dict()) on all ranks after "
                    "the parameters have another dtype."
                )

    def _shard(self, params: FlatParams, numbers: Mapping[int, int]) -> Shard:
        groups = [numbers[id(param)] for param in params.params]
        if params.region.whole:
            return WholeShard(params, self._groups, groups, self._group)
        for param, number in zip(params.params, groups, strict=True):
            if self._groups.trainers[number].needs_whole:
                kind = self._groups.trainers[number].kind.__name__
                raise DPFuseError(
                    f"rank {self._group.rank()}: a parameter of shape {tuple(param.shape)} was added for {kind}, "
                    f"which needs whole tensors, after its bucket was made, expected it before. Call add_param_group() "
                    "before the first forward in which the parameter is trained."
                )
        return ElementwiseShard(params, self._groups, groups)

    def add_group(self, group: dict[str, Any]) -> None:
        """Add a parameter group; its parameters follow in the next step."""
        self._groups.add(group)
        self._foreign = self._not_in(self._shards)
        self._sharding.own(self._groups)

    def _take_settings(self, before: list[dict[str, Any]]) -> None:
        """Take over what a step has changed in the parameter groups, such as a counter of steps."""
        for shard in self._shards:
            for number, after in shard.updater.changed_settings():
                for key, value in settings_of(after).items():
                    if key not in before[number] or before[number][key] is not value:
                        self._groups.groups[number][key] = value


def _places_of(shards: Sequence[Shard]) -> dict[Tensor, tuple[Shard, int]]:
    """Return the shard of each parameter, and its place there."""
    return {param: (shard, place) for shard in shards for place, param in enumerate(shard.flat_params.params)}


def refuse_missing(grads: GradSync, groups: ParamGroups) -> None:
    """Raise ValueError if the model trains a parameter that is in no parameter group."""
    ids = groups.numbers().keys()
    missing = [name for name, param in zip(names_of(grads.plan), grads.params, strict=True) if id(param) not in ids]
    if missing:
        raise ValueError(
            f"params: parameter {missing[0]!r} and {len(missing) - 1} more that the model trains are in no parameter "
            "group, expected all of them: after a backward no rank has their whole gradients. Freeze them before they "
            "are wrapped (requires_grad_(False)), or add a group, with lr=0.0 for example."
        )


def _is_like(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape


def _without_frames(error: BaseException) -> BaseException:
    """Return an error without the frames of a backward, which would keep that alive as long as the error is kept."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error
