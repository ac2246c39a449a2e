"""One bucket's parameters in one flat tensor, and this rank's part of them with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine import collective
from dpfuse.engine.waiting import board_of, finish
from dpfuse.sharded.delivery import ShardedDelivery
from dpfuse_kernels import Slot

__all__ = ["Run", "Shard", "settings_of"]

State = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Neighbouring parameters of a bucket, updated as one tensor. All ranks have the same runs.

    Args:
        group: number of the parameter group.
        first, last: places of its parameters in the bucket; `last` is not in it.
        own: this rank's part of them, in the flat tensor of the parameters, [elements]; may be empty. Then its state
            still tells what states there are.
        begin: where `own` begins in the flat tensor, in elements.
    """

    group: int
    first: int
    last: int
    own: Tensor
    begin: int


class Shard:
    """The parameters of one bucket. Each is a view of one flat tensor, in which it lies as its gradient in the buffer.

    Args:
        delivery: of the bucket's gradients.
        group: the ranks.
        groups: the number of the parameter group of each parameter, by place.
        make: makes an optimizer for parameter groups.

    Attributes:
        delivery: as given; that of another bucket with the same buffer may take its place.
        flat: the parameters, [elements].
        runs: in the order of the flat tensor.
        optimizer: of `own` of each run, which is a parameter group there.
    """

    def __init__(
        self,
        delivery: ShardedDelivery,
        group: dist.ProcessGroup,
        groups: Sequence[int],
        make: Callable[[list[tuple[int, Tensor]]], Optimizer],
    ) -> None:
        self.delivery = delivery
        self._group = group
        self._groups = groups
        self._make = make
        buffer = delivery.buffer
        self.flat = torch.zeros(buffer.flat.numel(), dtype=buffer.dtype, device=buffer.flat.device)
        self._begin, self._end = delivery.begin, delivery.end
        self._kept: dict[int, State] = {}  # states by place, until they are used
        self.take_parameters()
        self.runs: list[Run] = []
        self.optimizer: Optimizer
        self._use([place for place in range(len(groups)) if self._begins_group(place)])

    @property
    def slots(self) -> Sequence[Slot]:
        """Where each parameter lies in the flat tensor."""
        return self.delivery.buffer.gradients.slots

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters, by place."""
        return self.delivery.buffer.params

    def take_parameters(self) -> None:
        """Move those that do not lie in the flat tensor there, with their values."""
        with torch.no_grad():
            begin, size = self.flat.data_ptr(), self.flat.element_size()
            for param, slot in zip(self.params, self.slots, strict=True):
                if param.data_ptr() != begin + size * slot.offset:
                    view = self.flat.as_strided(slot.shape, slot.stride, slot.offset)
                    param.data = view.copy_(param)

    def step(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Update this rank's part with its gradients; a parameter whose `.grad` is None stays as it is.

        Args:
            settings: the hyperparameters of each parameter group.
        """
        touched = [param.grad is not None for param in self.params]
        self._separate(touched)
        flat = self.delivery.buffer.flat
        for run, inner in zip(self.runs, self.optimizer.param_groups, strict=True):
            inner.update(settings[run.group])
            run.own.grad = flat[run.begin : run.begin + run.own.numel()] if touched[run.first] else None
        self.optimizer.step()
        for run in self.runs:
            run.own.grad = None

    def start_gather(self) -> dist.Work:
        """Start to send this rank's part to all, and to receive theirs."""
        return collective.start_all_gather_into(self.flat, self.flat[self._begin : self._end], self._group)

    def whole_gradient(self, place: int) -> Tensor:
        """Return a copy of the averaged gradient of a parameter; to be called on all ranks."""
        flat, slot = self.delivery.buffer.flat, self.slots[place]
        work = collective.start_all_gather_into(flat, flat[self._begin : self._end], self._group)
        finish(work, board_of(self._group), flat.device.type)
        return flat.as_strided(slot.shape, slot.stride, slot.offset).clone()

    def whole_states(self) -> Iterator[tuple[Tensor, State, Collection[str]]]:
        """Yield each parameter, its whole state as a plain optimizer has it, and the keys of what is divided.

        To be called on all ranks. One bucket's states are in memory at a time.
        """
        states = [self.optimizer.state.get(run.own, {}) for run in self.runs]
        gathered: dict[str, Tensor] = {}
        for key in dict.fromkeys(key for state in states for key in state):
            kinds = {
                state[key].dtype for run, state in zip(self.runs, states, strict=True) if _divided(run, state, key)
            }
            if kinds:
                gathered[key] = self._gathered(key, states, kinds.pop())
        for run, state in zip(self.runs, states, strict=True):
            for place in range(run.first, run.last):
                slot = self.slots[place]
                yield (
                    self.params[place],
                    {
                        key: gathered[key].as_strided(slot.shape, slot.stride, slot.offset).clone()
                        if _divided(run, state, key)
                        else _copy(value)
                        for key, value in state.items()
                    },
                    gathered.keys(),
                )

    def _gathered(self, key: str, states: Sequence[State], dtype: torch.dtype) -> Tensor:
        whole = torch.zeros(self.flat.numel(), dtype=dtype, device=self.flat.device)
        for run, state in zip(self.runs, states, strict=True):
            if _divided(run, state, key):
                whole[run.begin : run.begin + run.own.numel()] = state[key]
        work = collective.start_all_gather_into(whole, whole[self._begin : self._end], self._group)
        finish(work, board_of(self._group), whole.device.type)
        return whole

    def keep(self, place: int, state: State, divided: Collection[str]) -> None:
        """Cut this rank's part out of the whole state of a parameter, for `use_kept`.

        Args:
            place: of the parameter.
            state: of it, as a plain optimizer has it.
            divided: keys of values with a number for each element.
        """
        self._kept[place] = {
            key: self._cut(place, value) if key in divided else _copy(value) for key, value in state.items()
        }

    def use_kept(self) -> None:
        """Use the states that were kept, in place of all that this optimizer has."""
        kept, self._kept = [self._kept.get(place, {}) for place in range(len(self._groups))], {}
        cuts = [
            place
            for place, state in enumerate(kept)
            if self._begins_group(place) or not _same_numbers(state, kept[place - 1])
        ]
        self._use(cuts)
        for run in self.runs:
            if kept[run.first]:
                self.optimizer.state[run.own] = {
                    key: self._joined(run, key, kept) if _is_flat(value) else value
                    for key, value in kept[run.first].items()
                }

    def _cut(self, place: int, value: Tensor) -> Tensor:
        slot = self.slots[place]
        dense = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=self.flat.device)
        dense.copy_(value)
        begin = min(max(slot.offset, self._begin), slot.offset + slot.numel)
        end = max(min(slot.offset + slot.numel, self._end), begin)
        return dense.as_strided((slot.numel,), (1,))[begin - slot.offset : end - slot.offset].clone()

    def _joined(self, run: Run, key: str, kept: Sequence[State]) -> Tensor:
        own = torch.zeros(run.own.numel(), dtype=kept[run.first][key].dtype, device=self.flat.device)
        for place in range(run.first, run.last):
            values = kept[place][key]
            begin = max(self.slots[place].offset, run.begin) - run.begin
            own[begin : begin + values.numel()] = values
        return own

    def _separate(self, touched: Sequence[bool]) -> None:
        """Cut runs between parameters of which only one has a gradient: the other's state must not change."""
        inside = {place for run in self.runs for place in range(run.first + 1, run.last)}
        if not any(touched[place] != touched[place - 1] for place in inside):
            return
        before = [(run, self.optimizer.state.get(run.own, {})) for run in self.runs]
        cuts = [run.first for run in self.runs]
        self._use(sorted(cuts + [place for place in inside if touched[place] != touched[place - 1]]))
        for run in self.runs:
            whole, state = next((old, state) for old, state in before if old.first <= run.first < old.last)
            own = slice(run.begin - whole.begin, run.begin - whole.begin + run.own.numel())
            if state:
                self.optimizer.state[run.own] = {
                    key: value[own].clone() if _divided(whole, state, key) else _copy(value)
                    for key, value in state.items()
                }

    def _begins_group(self, place: int) -> bool:
        return place == 0 or self._groups[place] != self._groups[place - 1]

    def _use(self, cuts: Sequence[int]) -> None:
        """Make the runs that begin at these places, without states."""
        ends = [*cuts[1:], len(self._groups)]
        self.runs = [self._run(first, last) for first, last in zip(cuts, ends, strict=True)]
        self.optimizer = self._make([(run.group, run.own) for run in self.runs])

    def _run(self, first: int, last: int) -> Run:
        begin = 0 if first == 0 else self.slots[first].offset
        end = self.flat.numel() if last == len(self._groups) else self.slots[last].offset
        begin = min(max(begin, self._begin), self._end)
        end = max(min(end, self._end), begin)
        return Run(self._groups[first], first, last, self.flat[begin:end], begin)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _divided(run: Run, state: State, key: str) -> bool:
    """Whether the ranks have parts of this value of the state, and not all of them the same number."""
    return key in state and isinstance(state[key], Tensor) and state[key].shape == run.own.shape


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same_numbers(state: State, other: State) -> bool:
    """Whether two states that were cut have the same keys, and the same values where those are not divided."""
    return state.keys() == other.keys() and all(
        _is_flat(value) == _is_flat(other[key])
        and (_is_flat(value) or bool(torch.as_tensor(value == other[key]).all()))
        for key, value in state.items()
    )
