"""ShardedOptimizer: torch's optimizer in front, of which each rank keeps one part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import NoneType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpfuse.arguments import a_callable, instance, real
from dpfuse.comm import votes
from dpfuse.engine.bucket_set import names_of
from dpfuse.errors import DPFuseError
from dpfuse.sharded.flat_params import refuse_shared
from dpfuse.sharded.groups import ParamGroups, settings_of
from dpfuse.sharded.shards import Shards, refuse_missing
from dpfuse.wrapper import SyncedModule, bare_module, sync_of

__all__ = ["ShardedOptimizer"]

WHAT = "the ShardedOptimizer"


class ShardedOptimizer(Optimizer):
    """An optimizer of which each rank keeps one part: its states, and the gradients that update them.

    Each backward that synchronises gives each rank the averaged gradients of its part. `step()` updates that part, and
    sends it to all ranks. So as many bytes travel as without it, and each rank has 1/N of the optimizer's states. The
    parameters are moved into one flat tensor for each bucket, of which each rank updates its part. A parameter stays
    where it is if others use its memory: views that the program keeps, other processes, an array that has lent it.

    What `.grad` is between backward and `zero_grad()` has no memory, and reading it raises an error: use
    `model.grad_norm()`, `model.clip_grad_norm_()` and `full_gradient()`. torch's and dpfuse's `GradScaler`, learning
    rate schedulers, `no_sync()` and `add_param_group` work as usual.

    Args:
        model: wrapped by dpfuse. Without a process group, the plain optimizer is used.
        optimizer_class: updates each element by itself, as SGD, Adam, AdamW, Adagrad and RMSprop do, or each tensor
            by itself, as Muon and Adafactor do. This is tried, unless the class has an attribute
            `needs_whole_tensors`. Then each rank updates some whole tensors; they are assigned by what their update
            costs. A class can have a function `update_cost(shape)`, in any unit; without it, the cost is Muon's.
        params: parameters or parameter groups, as torch's optimizers take them, with all that the model trains; None
            takes all of the model's. A group with the key "optimizer_class" is updated by that class.
        master_dtype: torch.float32 keeps a float32 copy of each parameter in 16 bits. The optimizer updates this
            rank's part of it, with states in float32, and rounds it to the parameter. None keeps no copy.
        step_in_backward: update the parameters of a bucket as soon as its gradients have landed, while backward runs.
            Then few buckets have memory for gradients. Each backward that synchronises is an update, and needs its
            `step()`; an error in such a backward leaves the parameters half updated.
        clip_by_last_norm: with `step_in_backward`, multiply gradients by what `clip_grad_norm_` with this norm would
            have multiplied those of the step before with. The first step is not clipped.
        defaults: hyperparameters, by keyword, as `optimizer_class` takes them.

    Attributes:
        optimizer_class: as given.
        param_groups, defaults: those of the plain optimizer; no defaults where groups name other classes.

    Raises:
        TypeError: `model` is not wrapped by dpfuse, `optimizer_class` is no class of an optimizer, or does not take an
            argument.
        ValueError: the update of one tensor depends on others, a parameter that is trained is missing, or the
            wrapper has an option that needs whole gradients.
        DPFuseError: the ranks' optimizers differ, or one of them could not be made; raised on every rank.

    Example:
        >>> import dpfuse, torch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
        >>> optimizer = dpfuse.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> model.clip_grad_norm_(1.0)
        tensor(9.4868)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> dist.destroy_process_group()

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 1,
    with the buckets of data parallelism as units; the arguments follow torch's `ZeroRedundancyOptimizer`.
    """

    def __init__(
        self,
        model: SyncedModule,
        optimizer_class: type[Optimizer],
        params: Iterable[Any] | None = None,
        *,
        master_dtype: torch.dtype | None = None,
        step_in_backward: bool = False,
        clip_by_last_norm: float | None = None,
        **defaults: Any,
    ) -> None:
        sync = sync_of(model, "ShardedOptimizer")
        self.optimizer_class = optimizer_class
        self._shards: Shards | None = None
        facts = ""
        try:
            _check_class(optimizer_class)
            instance("params", params, (Iterable, NoneType), "parameters, parameter groups or None")
            instance("step_in_backward", step_in_backward, bool, "True or False")
            if clip_by_last_norm is not None:
                real("clip_by_last_norm", clip_by_last_norm, "a number or None")
            if master_dtype not in (None, torch.float32):
                raise ValueError(
                    f"master_dtype must be torch.float32 or None, got {master_dtype!r}; leave it out for None"
                )
            if sync is None and (master_dtype is not None or step_in_backward):
                option = "step_in_backward=True" if master_dtype is None else f"master_dtype={master_dtype}"
                raise ValueError(
                    f"{option} was given without a process group, expected one, also for one rank: only the plain "
                    "optimizer is used. Call dpfuse.init_parallel_env() before the model is wrapped."
                )
            if clip_by_last_norm is not None and not (step_in_backward and clip_by_last_norm > 0):
                raise ValueError(
                    f"clip_by_last_norm must be above 0 and needs step_in_backward=True, got {clip_by_last_norm} and "
                    f"{step_in_backward}; without the latter, call model.clip_grad_norm_()."
                )
            given = _averaged(model) if params is None else params
            groups = ParamGroups(optimizer_class, given, defaults, divided=sync is not None)
            super().__init__(groups.groups, {})
            self._groups, self.param_groups, self.defaults = groups, groups.groups, groups.defaults
            groups.owner = ref(self)
            if sync is not None:
                sync.check_divisible(in_backward=step_in_backward)
                refuse_missing(sync.grads, groups)
                refuse_shared(zip(names_of(sync.grads.plan), sync.grads.params, strict=True))
                groups.try_out(master_dtype)
                options = f"master_dtype={master_dtype}\nstep_in_backward={step_in_backward}"
                facts = f"{_facts_of(groups, model)}\n{options}\nclip_by_last_norm={clip_by_last_norm}"
        except Exception as error:
            if sync is not None:
                votes.report_failure(error, sync.grads.group, WHAT)
            raise
        self._masters = master_dtype is not None
        if sync is None:
            self._states = groups.share_state()
            return
        votes.agree_on_text(facts, sync.grads.group, WHAT, "Pass the same arguments on every rank.")
        self._shards = Shards(
            sync,
            groups,
            masters=self._masters,
            in_backward=step_in_backward,
            largest_norm=clip_by_last_norm,
        )
        self._states = _InShards(self._shards)

    @property
    def state(self) -> Any:
        """The states by parameter, as torch's optimizers have them. In shards they can be dropped, and not be read.

        `pop`, `del`, `clear` and assigning an empty mapping, to one entry or to all of it, reset states as in a plain
        optimizer; call them on all ranks. Reading or assigning an entry raises a DPFuseError.
        """
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        shards = self.__dict__.get("_shards")
        if shards is None:
            self._states = states
        elif states is not self._states:
            if not isinstance(states, Mapping) or states:
                raise _refusal("states were assigned to")
            self._states.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({key: value for key, value in state.items() if key != "state"})
        self._states = state["state"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients of the last backward; to be called on all ranks.

        Args:
            closure: computes the loss again, with `backward()`; returns it.

        Returns:
            What `closure` has returned; None without one.

        Raises:
            DPFuseError: a backward is running; a parameter has a gradient that was not averaged, or is in no parameter
                group; this rank could not update its part, or another one has ended.
        """
        loss = None
        if closure is not None:
            a_callable("closure", closure, "a function that computes the loss, or None")
            with torch.enable_grad():
                loss = closure()
        if self._shards is None:
            self._groups.step()
        elif self._shards.in_backward is not None:
            self._shards.step_after_backward()
        else:
            self._shards.step()
        return loss

    @property
    def last_norm(self) -> Tensor | None:
        """The norm of the gradients of the last step before they were clipped, with `clip_by_last_norm`, [] float32."""
        shards = self._shards
        return None if shards is None or shards.in_backward is None else shards.in_backward.norm

    def full_gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return a copy of the averaged gradient of a parameter, between backward and `zero_grad()`.

        To be called on all ranks, for the same parameter.

        Args:
            param: of the model.

        Returns:
            The gradient, of the shape, dtype and device of the parameter; None if it has none.

        Raises:
            TypeError: this is no parameter.
            DPFuseError: the gradient was not averaged by a backward of the wrapped model.
        """
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"param of full_gradient: got a {type(param).__name__}, expected a parameter of the model. Pass for "
                "example model.module.get_parameter(name)."
            )
        if self._shards is not None:
            return self._shards.full_gradient(param)
        return None if param.grad is None else param.grad.clone()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's: for parameters that the model trains from now on, such as unfrozen ones."""
        instance("param_group", param_group, dict, 'a dict with "params", as for torch\'s optimizers')
        if not hasattr(self, "_groups"):  # torch's constructor adds the first ones
            super().add_param_group(param_group)
        elif self._shards is None:
            self._groups.add(param_group)
        else:
            self._shards.add_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in the form of the plain optimizer; to be called on all ranks.

        Each rank gets all of it, so a program can save it on rank 0, and load it with any number of ranks, or into the
        plain optimizer.
        """
        if self._shards is None:
            return super().state_dict()
        in_shards, self._states = self._states, defaultdict(dict, self._shards.whole_states())
        try:
            return super().state_dict()
        finally:
            self._states = in_shards

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of the plain optimizer returned; to be called on all ranks.

        Raises:
            TypeError: this is no dict.
            ValueError: it is not that of an optimizer, or its parameter groups do not fit.
        """
        _check_state(state_dict)
        super().load_state_dict(state_dict)
        self._groups.use(self.param_groups, self._states)
        if self._shards is not None:
            self._shards.load(self._exact(state_dict) if self._masters else self._states)
            self._states = _InShards(self._shards)

    def _exact(self, state_dict: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """Return the states by parameter as they are saved; torch has rounded those in `state` to 16 bits."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        found: dict[Tensor, dict[str, Any]] = {}
        for index, param in zip(saved, params, strict=True):
            if state := state_dict["state"].get(index):
                tensors = {key: v.to(param.device) for key, v in state.items() if isinstance(v, Tensor) and v.dim()}
                found[param] = {**state, **tensors}
        return found

    def __getstate__(self) -> dict[str, Any]:
        raise DPFuseError("a ShardedOptimizer cannot be copied or pickled, expected its state_dict(); save that.")


def _averaged(model: SyncedModule) -> list[nn.Parameter]:
    """Return the parameters of the model, without those that a program has told the wrapper to leave alone."""
    ignored = sync.options.ignored if (sync := sync_of(model, "ShardedOptimizer")) is not None else ()
    return [param for name, param in bare_module(model).named_parameters() if name not in ignored]


def _check_class(optimizer_class: Any) -> None:
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer):
        return
    if isinstance(optimizer_class, Optimizer):
        name = type(optimizer_class).__name__
        got, remedy = f"an instance of {name}", f"ShardedOptimizer(model, torch.optim.{name}, lr=...)"
    else:
        got, remedy = repr(optimizer_class), "ShardedOptimizer(model, torch.optim.AdamW, lr=...)"
    raise TypeError(
        f"optimizer_class: got {got}, expected the class of an optimizer, which is made here. Pass the class, and its "
        f"arguments by keyword: {remedy}."
    )


def _check_state(state_dict: Any) -> None:
    expected = "expected what state_dict() of this optimizer, or of a plain one, has returned"
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"load_state_dict got a {type(state_dict).__name__}, {expected}. If this is a file, read it first: "
            "load_state_dict(torch.load(path))."
        )
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"load_state_dict got a dict without 'state' or 'param_groups', {expected}. Pass the state dict of an "
            "optimizer, not that of a model or a whole checkpoint."
        )


class _InShards(MutableMapping[Any, Any]):
    """Stands for the states in the shards: these can be dropped, and neither be read nor written."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __len__(self) -> int:
        return len(self._shards.stated())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shards.stated())

    def __contains__(self, key: object) -> bool:
        return any(key is param for param in self)

    def __getitem__(self, key: Any) -> Any:
        raise _refusal("the state of a parameter was read in")

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, Mapping) or value:
            raise _refusal("a state of a parameter was assigned in")
        self.pop(key, None)

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def values(self) -> Any:
        return dict(self.items()).values()

    def items(self) -> Any:
        return {param: _Entry() for param in self}.items()

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Drop a state. What is returned has no items: each rank has one part of them."""
        if key in self:
            self._shards.forget([key])
            return {}
        if default:
            return default[0]
        raise KeyError(key)

    def clear(self) -> None:
        self._shards.forget(self._shards.stated())

    def __reduce__(self) -> Any:
        raise _refusal("the states of all parameters were copied in")

    def __repr__(self) -> str:
        return f"<states of {len(self)} parameters, divided among the ranks>"


class _Entry(MutableMapping[str, Any]):
    """Stands for the state of one parameter: a trainer may go over it to move its tensors, and not use any of them."""

    def items(self) -> Any:
        return [("in shards", _Part())]

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, _Part):
            raise _refusal("the state of a parameter was assigned in")

    def _refuse(self, *_: Any) -> Any:
        raise _refusal("the state of a parameter was used in")

    __getitem__ = __delitem__ = __iter__ = __len__ = keys = values = _refuse


class _Part(Tensor):
    """Stands for all tensors of one state: it is a tensor, so that what would change the state raises an error."""

    @staticmethod
    def __new__(cls) -> _Part:
        return torch.empty(0, device="cpu").as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:  # a trainer may go over all states to move them
            return args[0]
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        raise _refusal(f"{name} of a state was used in")

    def __repr__(self) -> str:  # type: ignore[override]
        return "<in shards>"


def _refusal(what: str) -> DPFuseError:
    return DPFuseError(
        f"{what} a ShardedOptimizer, which is not possible: each rank has one part of it. Call state_dict() on every "
        'rank, and read its "state"; change that, and call load_state_dict(). To reset a state, delete its entry on '
        "every rank."
    )


def _facts_of(groups: ParamGroups, model: nn.Module) -> str:
    """Describe an optimizer for the comparison with the other ranks, one fact per line."""
    names = {id(param): name for name, param in model.named_parameters()}
    lines = []
    for number, (group, trainer) in enumerate(zip(groups.groups, groups.trainers, strict=True)):
        lines.append(f"group {number}: optimizer_class={trainer.kind.__module__}.{trainer.kind.__qualname__}")
        lines += [f"group {number}: {key}={value!r}" for key, value in settings_of(group).items()]
        lines += [
            f"group {number}: {names.get(id(param), 'a parameter of another model')}" for param in group["params"]
        ]
    return "\n".join(lines)
