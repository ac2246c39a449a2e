"""The parameter groups of a sharded optimizer, and the plain optimizers to which they belong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.sharded.owners import muon_cost
from dpfuse.sharded.trial import needs_whole_tensors

__all__ = ["MASTER", "OPTIMIZER_CLASS", "ParamGroups", "State", "Updater", "settings_of"]

State = dict[str, Any]
MASTER = "master_param"  # key of the float32 copy of a parameter in its state
OPTIMIZER_CLASS = "optimizer_class"  # key of a group that another class updates


class Trainer:
    """Makes optimizers of one class.

    Args:
        kind: the class.
        keywords: arguments of it.
        groups: some parameter groups, as torch's optimizers take them.

    Attributes:
        kind: as given.
        plain: an optimizer of these groups, which is stepped only without a process group.
        needs_whole: whether it needs whole tensors; `try_out` finds it.
    """

    def __init__(self, kind: type[Optimizer], keywords: Mapping[str, Any], groups: Iterable[Any]) -> None:
        self.kind = kind
        self._keywords = dict(keywords)
        self.plain = kind(groups, **self._keywords)
        self.needs_whole = False

    def try_out(self, dtype: torch.dtype | None) -> None:
        """Find whether the optimizer needs whole tensors.

        Args:
            dtype: of what it updates; None for that of the parameters.

        Raises:
            ValueError: it needs more than that.
        """
        needs = set()
        for group in self.plain.param_groups:
            if not group["params"]:
                continue

            def make(params: list[Tensor], group: Mapping[str, Any] = group) -> Optimizer:
                return self.kind([{"params": params, **settings_of(group)}], **self._keywords)

            like = group["params"][0]
            like = torch.empty(0, dtype=like.dtype if dtype is None else dtype, device=like.device)
            needs.add(needs_whole_tensors(self.kind, make, like))
        self.needs_whole = any(needs)

    def optimizer(self, members: Sequence[tuple[Mapping[str, Any], Tensor]]) -> Optimizer:
        """Return an optimizer of these tensors, each in a parameter group of its own, with these hyperparameters."""
        return self.kind([{"params": [own], **settings} for settings, own in members], **self._keywords)

    def cost(self, shape: Sequence[int]) -> float:
        """Return what the update of a tensor costs; a class can have a function `update_cost(shape)`."""
        own = getattr(self.kind, "update_cost", None)
        if own is not None:
            return float(own(tuple(shape)))
        return muon_cost(shape) if len(shape) == 2 else float(math.prod(shape))


class ParamGroups:
    """All parameter groups, in the order in which they were given, and the trainer of each.

    Args:
        kind: the class of the groups that name none.
        params: parameters or parameter groups, as torch's optimizers take them. A group with the key
            "optimizer_class" is updated by that class.
        keywords: arguments of `kind`.

    Attributes:
        groups: as torch's optimizers hold them.
        trainers: by number of the group.

    Raises:
        TypeError: an argument is wrong, as torch says.
        ValueError: as torch says.
    """

    def __init__(self, kind: type[Optimizer], params: Iterable[Any], keywords: Mapping[str, Any]) -> None:
        self._kind = kind
        given = list(params)
        kinds = [_class_in(each, kind) for each in given] if given and isinstance(given[0], dict) else [kind]
        if kinds == [kind] * len(kinds):  # also if there are no groups: the class knows what to say
            one = Trainer(kind, keywords, [*map(_without_class, given)])
            self._all = [one]
            self.groups = one.plain.param_groups
            self.trainers = [one] * len(self.groups)
            return
        by_kind: dict[type[Optimizer], list[Any]] = {}
        for each, group in zip(kinds, given, strict=True):
            by_kind.setdefault(each, []).append(_without_class(group))
        made = {each: Trainer(each, keywords if each is kind else {}, groups) for each, groups in by_kind.items()}
        self._all = list(made.values())
        waiting = {each: iter(trainer.plain.param_groups) for each, trainer in made.items()}
        self.trainers = [made[each] for each in kinds]
        self.groups = [next(waiting[each]) for each in kinds]

    @property
    def defaults(self) -> dict[str, Any]:
        """The hyperparameters of groups that set none, where all are of one class."""
        return self._all[0].plain.defaults if len(self._all) == 1 else {}

    def try_out(self, dtype: torch.dtype | None) -> None:
        """As `Trainer.try_out`, for all classes."""
        for trainer in self._all:
            trainer.try_out(dtype)

    def add(self, group: dict[str, Any]) -> None:
        """Add a parameter group; it may name a class, as those that were given."""
        kind = _class_in(group, self._kind)
        found = [trainer for trainer in self._all if trainer.kind is kind]
        if not found:
            known = ", ".join(trainer.kind.__name__ for trainer in self._all)
            raise ValueError(
                f"optimizer_class of an added group: got {kind.__name__}, expected one of {known}, with which the "
                "ShardedOptimizer was made. Give such a group when the optimizer is made."
            )
        found[0].plain.add_param_group(_without_class(group))
        added = found[0].plain.param_groups[-1]
        if self.groups is not found[0].plain.param_groups:
            self.groups.append(added)
        self.trainers.append(found[0])

    def use(self, groups: list[dict[str, Any]], state: Any) -> None:
        """Use these groups, of the same parameters, in place of those that there are; `state` is of all parameters."""
        self.groups = groups
        for trainer in self._all:
            own = [group for group, each in zip(groups, self.trainers, strict=True) if each is trainer]
            trainer.plain.__setstate__({"state": state, "param_groups": own})  # of its class: it knows older keys

    def step(self) -> None:
        """Update whole parameters with the plain optimizers."""
        for trainer in self._all:
            trainer.plain.step()

    def numbers(self) -> dict[int, int]:
        """Return the number of the group of each parameter, by its id."""
        return {id(param): number for number, group in enumerate(self.groups) for param in group["params"]}

    def settings(self) -> list[dict[str, Any]]:
        """Return the hyperparameters of each group."""
        return [settings_of(group) for group in self.groups]


class Updater:
    """Updates tensors, each of which belongs to a parameter group.

    Args:
        param_groups: all groups.
        members: the number of its group, and the tensor.

    Attributes:
        inner: of each tensor, its parameter group in the optimizer that updates it.
    """

    def __init__(self, param_groups: ParamGroups, members: Sequence[tuple[int, Tensor]]) -> None:
        by_trainer: dict[Trainer, list[int]] = {}
        for index, (number, _) in enumerate(members):
            by_trainer.setdefault(param_groups.trainers[number], []).append(index)
        settings = param_groups.settings()
        self._optimizers: list[Optimizer] = []
        self._of: dict[int, Optimizer] = {}
        self.inner: list[dict[str, Any]] = [{}] * len(members)
        self._members = members
        for trainer, indices in by_trainer.items():
            optimizer = trainer.optimizer([(settings[members[index][0]], members[index][1]) for index in indices])
            self._optimizers.append(optimizer)
            for index, inner in zip(indices, optimizer.param_groups, strict=True):
                self.inner[index] = inner
                self._of[index] = optimizer

    @property
    def has_states(self) -> bool:
        """Whether there are states."""
        return any(optimizer.state for optimizer in self._optimizers)

    def state(self, index: int) -> State:
        """Return the state of a tensor."""
        found: State = self._of[index].state.get(self._members[index][1], {})
        return found

    def kind(self, index: int) -> type[Optimizer]:
        """Return the class of the optimizer that updates a tensor."""
        return type(self._of[index])

    def set_state(self, index: int, state: State) -> None:
        """Use this state of a tensor."""
        self._of[index].state[self._members[index][1]] = state

    def step(self, settings: Sequence[Mapping[str, Any]], grads: Sequence[Tensor | None]) -> None:
        """Update the tensors.

        Args:
            settings: the hyperparameters of each parameter group.
            grads: of each tensor; one without a gradient stays as it is.
        """
        for (number, own), inner, grad in zip(self._members, self.inner, grads, strict=True):
            inner.update(settings[number])
            own.grad = grad
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


def _without_class(group: Any) -> Any:
    if not isinstance(group, dict):
        return group
    return {key: value for key, value in group.items() if key != OPTIMIZER_CLASS}
