"""The parameter groups of a sharded optimizer, and the plain optimizers to which they belong."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpfuse.engine.inner_tensors import has_memory
from dpfuse.engine.optimizer_step_hook import leave_steps_untold
from dpfuse.errors import DPFuseError
from dpfuse.sharded.owners import muon_cost
from dpfuse.sharded.trial import keeps_elsewhere, needs_whole_tensors, widest

__all__ = ["MASTER", "OPTIMIZER_CLASS", "ParamGroups", "State", "Updater", "settings_of"]

State = dict[str, Any]
MASTER = "master_param"  # key of the float32 copy of a parameter in its state
OPTIMIZER_CLASS = "optimizer_class"  # key of a group that another class updates
TRIED_RATE = 0.1


class Trainer:
    """Makes optimizers of one class.

    Attributes:
        needs_whole: whether it needs whole tensors; `try_out` finds it.
        keeps_elsewhere: whether its next step needs more than its `state` and its settings; `try_out` finds it.
    """

    def __init__(self, kind: type[Optimizer], keywords: Mapping[str, Any]) -> None:
        self.kind = kind
        self._keywords = dict(keywords)
        self.needs_whole = False
        self.keeps_elsewhere = False

    def plain(self, groups: Iterable[Any]) -> Optimizer:
        """Return an optimizer of these groups, with whatever states its constructor makes.

        No user of the hooks on all optimizers hears of its steps, but of those of the sharded optimizer.
        """
        made = self.kind(groups, **self._keywords)
        leave_steps_untold(made)
        return made

    def completed(self, groups: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return these groups with all their settings, and the defaults of the class, and leave no states."""
        made, params = self._empty(groups)
        found = [{**group, "params": [params[each] for each in group["params"]]} for group in made.param_groups]
        return found, made.defaults

    def convert(self, groups: list[dict[str, Any]], state: Any) -> None:
        """Let the class bring loaded groups and states into the form that it has today: it knows older keys."""
        self._empty(groups)[0].__setstate__({"state": state, "param_groups": groups})

    def _empty(self, groups: Sequence[dict[str, Any]]) -> tuple[Optimizer, dict[Tensor, Tensor]]:
        """Return an optimizer that is not stepped, and the parameter for which each of its tensors stands.

        Its tensors have no memory, so the states that a constructor makes have none either.
        """
        stand_ins = {param: _stand_in(param) for group in groups for param in group["params"]}
        params = {stand_in: param for param, stand_in in stand_ins.items()}
        try:
            with torch.device("meta"):  # also for states that are made without regard to a device
                made = self.plain([{**group, "params": [stand_ins[p] for p in group["params"]]} for group in groups])
            known = all(each in params for group in made.param_groups for each in group["params"])
            if known and not _without_memory([[settings_of(group) for group in made.param_groups], made.defaults]):
                return made, params
        except Exception:
            pass  # it reads numbers, or asks for a device. If something else is wrong, it is raised below.
        made = self.plain([{**group} for group in groups])
        made.state = defaultdict(dict)  # also if it lies in a cycle of references, which would live for a while
        return made, {param: param for group in made.param_groups for param in group["params"]}

    def try_out(self, groups: Iterable[Mapping[str, Any]], dtype: torch.dtype | None) -> None:
        """Find what the optimizer needs.

        Args:
            dtype: of what it updates; None for that of the parameters.

        Raises:
            ValueError: it needs more than whole tensors.
        """
        for group in groups:
            numbers = [each for each in group["params"] if each.dtype.is_floating_point]  # integers are frozen
            if not numbers:
                continue

            settings = settings_of(group)
            rate = settings.get("lr")
            if isinstance(rate, Tensor):
                settings["lr"] = torch.full_like(rate, TRIED_RATE)
            elif rate is not None:  # a small one, as at the beginning of a warm-up, would hide how updates differ
                settings["lr"] = TRIED_RATE

            def make(params: list[Tensor], settings: Mapping[str, Any] = settings) -> Optimizer:
                return self.plain([{"params": params, **settings}])

            like = next((each for each in numbers if each.requires_grad), numbers[0])
            like = torch.empty(0, dtype=like.dtype if dtype is None else dtype, device=like.device)
            wide = widest(make, like)
            self.needs_whole |= needs_whole_tensors(self.kind, make, wide)
            self.keeps_elsewhere |= keeps_elsewhere(make, wide) or (wide is not like and keeps_elsewhere(make, like))

    def cost(self, shape: Sequence[int]) -> float:
        """Return what the update of a tensor costs; a class can have a function `update_cost(shape)`."""
        own = getattr(self.kind, "update_cost", None)
        if own is not None:
            cost = float(own(tuple(shape)))
            if not 0 <= cost < math.inf:
                raise ValueError(
                    f"update_cost of {self.kind.__name__} has returned {cost} for the shape {tuple(shape)}, expected a "
                    "finite number that is not negative. Correct it, or leave it out."
                )
            return cost
        return muon_cost(shape) if len(shape) == 2 else float(math.prod(shape))


class ParamGroups:
    """All parameter groups, in the order in which they were given, and the trainer of each.

    Args:
        kind: the class of the groups that name none.
        params: parameters or parameter groups, as torch's optimizers take them. A group with the key
            "optimizer_class" is updated by that class.
        divided: whether each rank has a part of the states. Then no optimizer of whole parameters is kept.

    Attributes:
        groups: as torch's optimizers hold them.
        defaults: the hyperparameters of groups that set none; empty where groups are of several classes.
        trainers: by number of the group.

    Raises:
        TypeError: an argument is wrong, as torch says.
        ValueError: as torch says.
    """

    def __init__(
        self, kind: type[Optimizer], params: Iterable[Any], keywords: Mapping[str, Any], *, divided: bool
    ) -> None:
        self._kind = kind
        self._plain: dict[Trainer, Optimizer] = {}  # of whole parameters, which `step` steps
        self.owner: Callable[[], Optimizer | None] = lambda: None  # returns the optimizer whose groups a program sees
        self.groups: list[dict[str, Any]]
        self.trainers: list[Trainer]
        given = _checked(params) if divided else list(params)
        kinds = [_class_in(each, kind) for each in given] if given and isinstance(given[0], dict) else [kind]
        by_kind: dict[type[Optimizer], list[Any]] = {each: [] for each in kinds}
        if kinds == [kind] * len(kinds):  # also if there are no groups: the class knows what to say
            by_kind[kind] = [*map(_without_class, given)]
        else:
            for each, group in zip(kinds, given, strict=True):
                by_kind[each].append(_without_class(group))
        self._all = {each: Trainer(each, keywords if each is kind else {}) for each in by_kind}
        completed = {}
        for each, own in by_kind.items():
            trainer = self._all[each]
            if divided:
                completed[each], self.defaults = trainer.completed(own)
            else:
                plain = self._plain[trainer] = trainer.plain(own)
                completed[each], self.defaults = plain.param_groups, plain.defaults
        if len(by_kind) == 1:
            (self.groups,) = completed.values()
            self.trainers = [*self._all.values()] * len(self.groups)
        else:
            waiting = {each: iter(groups) for each, groups in completed.items()}
            self.groups = [next(waiting[each]) for each in kinds]
            self.trainers = [self._all[each] for each in kinds]
            self.defaults = {}
        self._members = [{id(param) for param in group["params"]} for group in self.groups]

    def try_out(self, dtype: torch.dtype | None) -> None:
        """As `Trainer.try_out`, for all classes."""
        for trainer in self._all.values():
            trainer.try_out(self._own(trainer, self.groups), dtype)

    def add(self, group: dict[str, Any]) -> None:
        """Add a parameter group; it may name a class, as those that were given."""
        kind = _class_in(group, self._kind)
        trainer = self._all.get(kind)
        if trainer is None:
            known = ", ".join(each.__name__ for each in self._all)
            raise ValueError(
                f"optimizer_class of an added group: got {kind.__name__}, expected one of {known}, with which the "
                "ShardedOptimizer was made. Give such a group when the optimizer is made."
            )
        plain = self._plain.get(trainer)
        if plain is None:
            (added,), _ = trainer.completed([_checked([*self.groups, _without_class(group)])[-1]])
        else:
            plain.add_param_group(_without_class(group))
            added = plain.param_groups[-1]
        if plain is None or self.groups is not plain.param_groups:
            self.groups.append(added)
        self.trainers.append(trainer)
        self._members.append({id(param) for param in added["params"]})

    def use(self, groups: list[dict[str, Any]], state: Any) -> None:
        """Use these groups, of the same parameters, in place of those that there are; `state` is of all parameters."""
        self.groups = groups
        for trainer in self._all.values():
            own = self._own(trainer, groups)
            plain = self._plain.get(trainer)
            if plain is None:
                trainer.convert(own, state)
            else:
                plain.__setstate__({"state": state, "param_groups": own})

    def share_state(self) -> Any:
        """Let the plain optimizers have one dict of states, with all that they have made so far, and return it."""
        plain = [*self._plain.values()]
        state = plain[0].state
        for each in plain[1:]:
            state.update(each.state)
            each.state = state
        return state

    def step(self) -> None:
        """Update whole parameters with the plain optimizers."""
        for plain in self._plain.values():
            plain.step()

    def _own(self, trainer: Trainer, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [group for group, each in zip(groups, self.trainers, strict=True) if each is trainer]

    def numbers(self) -> dict[int, int]:
        """Return the number of the group of each parameter, by its id."""
        return {id(param): number for number, group in enumerate(self.groups) for param in group["params"]}

    def settings(self) -> list[dict[str, Any]]:
        """Return the hyperparameters of each group, which a program may have replaced by another dict.

        Raises:
            DPFuseError: the program has given a group other parameters, or there are other groups.
        """
        self.groups = self._seen()
        changed = self.changed()
        if changed:
            raise DPFuseError(
                f"param_groups of a ShardedOptimizer: {changed}, expected the groups with which it was made, since the "
                "ranks have divided their states. Call add_param_group() for more parameters; to train fewer, freeze "
                "them, or set their .grad to None."
            )
        return [settings_of(group) for group in self.groups]

    def _seen(self) -> list[dict[str, Any]]:
        owner = self.owner()
        return self.groups if owner is None else owner.param_groups

    def changed(self) -> str:
        """Say which group has other parameters than those that were given; empty if none has."""
        groups = self._seen()
        if len(groups) != len(self._members):
            return f"there are {len(groups)} groups instead of {len(self._members)}"
        for number, (group, members) in enumerate(zip(groups, self._members, strict=True)):
            if {id(param) for param in group["params"]} != members:
                return f"group {number} has other parameters"
        return ""


class Updater:
    """Updates tensors, each of which belongs to a parameter group.

    Args:
        members: the number of its group, and the tensor.

    Attributes:
        inner: of each tensor, its parameter group in the optimizer that updates it.
    """

    def __init__(self, param_groups: ParamGroups, members: Sequence[tuple[int, Tensor]]) -> None:
        by_trainer: dict[Trainer, list[int]] = {}
        for index, (number, _) in enumerate(members):
            by_trainer.setdefault(param_groups.trainers[number], []).append(index)
        settings = param_groups.settings()
        self._stepped = False
        self._elsewhere = next((each.kind.__name__ for each in by_trainer if each.keeps_elsewhere), "")
        self._optimizers: list[Optimizer] = []
        self._of: dict[int, Optimizer] = {}
        self.inner: list[dict[str, Any]] = [{}] * len(members)
        self._members = members
        for trainer, indices in by_trainer.items():
            own = [{"params": [members[index][1]], **settings[members[index][0]]} for index in indices]
            optimizer = trainer.plain(own)  # each tensor is in a parameter group of its own
            self._optimizers.append(optimizer)
            for index, inner in zip(indices, optimizer.param_groups, strict=True):
                self.inner[index] = inner
                self._of[index] = optimizer

    def state(self, index: int) -> State:
        """Return the state of a tensor."""
        found: State = self._of[index].state.get(self._members[index][1], {})
        return found

    def kind(self, index: int) -> type[Optimizer]:
        """Return the class of the optimizer that updates a tensor."""
        return type(self._of[index])

    def forget(self, index: int) -> None:
        """Drop the state of a tensor, as if it had never been updated."""
        self._of[index].state.pop(self._members[index][1], None)

    def set_state(self, index: int, state: State) -> None:
        """Use this state of a tensor."""
        self._of[index].state[self._members[index][1]] = state

    def leave(self, rank: int) -> None:
        """Note that the states of these tensors move to another updater.

        Raises:
            DPFuseError: an optimizer has more than states, which would not move.
        """
        if self._elsewhere and self._stepped:
            raise DPFuseError(
                f"rank {rank}: {self._elsewhere} keeps what its next step needs outside of its `state`, and its states "
                "have to move: buckets have changed, a parameter has no gradient, or a state dict is loaded after a "
                "step. Expected all of it in self.state[param]. Keep it there, as torch's optimizers do."
            )

    def step(self, settings: Sequence[Mapping[str, Any]], grads: Sequence[Tensor | None]) -> None:
        """Update the tensors with the hyperparameters of their groups. One without a gradient stays as it is."""
        for (number, own), inner, grad in zip(self._members, self.inner, grads, strict=True):
            inner.update(settings[number])
            own.grad = grad
        self._stepped = True
        try:
            for optimizer in self._optimizers:
                optimizer.step()
        finally:
            for _, own in self._members:
                own.grad = None

    def changed_settings(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the number of each tensor's group, and the settings of the group after the last step."""
        for (number, _), inner in zip(self._members, self.inner, strict=True):
            yield number, inner


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _class_in(group: Mapping[str, Any], usual: type[Optimizer]) -> type[Optimizer]:
    kind = group.get(OPTIMIZER_CLASS, usual)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(
            f"{OPTIMIZER_CLASS} of a parameter group must be a class of torch.optim.Optimizer, got {kind!r}; pass "
            "torch.optim.Muon, for example."
        )
    return kind


class _Checked(Optimizer):
    """Has no settings and no update: torch's class checks parameter groups, and brings them into one form."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})


def _checked(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return copies of parameter groups in the form in which torch's optimizers hold them."""
    given = [{**each} if isinstance(each, dict) else each for each in params]
    return _Checked(given).param_groups


def _stand_in(param: Tensor) -> Tensor:
    """Return a tensor without memory, with all else that a parameter has."""
    with torch._C.DisableTorchFunctionSubclass():
        if type(param) in (Tensor, nn.Parameter) and has_memory(param):
            empty = torch.empty_like(param, device="meta", requires_grad=False)
        elif param.is_nested or param.layout is not torch.strided or param.is_quantized:  # frozen ones
            empty = torch.empty((), device="meta")
        else:  # a class may know no operation
            empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
    if isinstance(param, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=param.requires_grad)
    else:
        empty.requires_grad_(param.requires_grad)
    empty.__dict__.update(param.__dict__)  # programs mark parameters for their optimizer
    return empty


def _without_memory(values: Any) -> bool:
    """Whether one of these values, in lists and dicts, is a tensor without memory."""
    if isinstance(values, Tensor):
        return values.is_meta
    if isinstance(values, Mapping):
        return any(map(_without_memory, values.values()))
    return isinstance(values, list | tuple) and any(map(_without_memory, values))


def _without_class(group: Any) -> Any:
    if not isinstance(group, dict):
        return group
    return {key: value for key, value in group.items() if key != OPTIMIZER_CLASS}
