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
CACHED = 1 << 20  # bytes of a run on a CPU: an optimizer's operations, one after the other, find it in the caches


@dataclass(frozen=True)
class Run:
    """Elements of neighbouring parameters of a bucket, which this rank updates as one tensor.

    Args:
        group: number of the parameter group.
        first, last: places of the parameters in the bucket; `last` is not one of them. All ranks have the same ones.
        own: some of this rank's part of them, in the flat tensor of the parameters, [elements]. It may be empty: its
            state still tells what states there are.
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
        self.use_kept()

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
        kinds = {key: state[key].dtype for run, state in self._stated() for key in state if _is_flat(state[key])}
        gathered = {key: self._gathered(key, kind) for key, kind in kinds.items()}
        numbers = {place: state for run, state in self._stated() for place in range(run.first, run.last)}
        for place, (param, slot) in enumerate(zip(self.params, self.slots, strict=True)):
            state = {
                key: gathered[key].as_strided(slot.shape, slot.stride, slot.offset).clone()
                if _is_flat(value)
                else _copy(value)
                for key, value in numbers[place].items()
            }
            yield param, state, gathered.keys()

    def _gathered(self, key: str, dtype: torch.dtype) -> Tensor:
        whole = torch.zeros(self.flat.numel(), dtype=dtype, device=self.flat.device)
        for run, state in self._stated():
            if key in state:
                whole[run.begin : run.begin + run.own.numel()] = state[key]
        work = collective.start_all_gather_into(whole, whole[self._begin : self._end], self._group)
        finish(work, board_of(self._group), whole.device.type)
        return whole

    def _stated(self) -> Iterator[tuple[Run, State]]:
        """Yield each run and its state; what is divided has one dimension there, and numbers have none."""
        for run in self.runs:
            yield run, self.optimizer.state.get(run.own, {})

    def keep(self, place: int, state: State, divided: Collection[str]) -> None:
        """Cut this rank's part out of the whole state of a parameter, for `use_kept`.

        Args:
            place: of the parameter.
            state: of it, as a plain optimizer has it.
            divided: keys of values with a number for each element.
        """
        slot = self.slots[place]
        begin, end = self._own_range(slot.offset, slot.offset + slot.numel)
        self._kept[place] = {
            key: _flattened(value, slot)[begin - slot.offset : end - slot.offset].clone() if key in divided else value
            for key, value in state.items()
        }

    def use_kept(self) -> None:
        """Use the states that were kept, in place of all that this optimizer has."""
        kept, self._kept = [self._kept.get(place, {}) for place in range(len(self._groups))], {}
        unlike = [place for place in range(1, len(kept)) if not _same_numbers(kept[place], kept[place - 1])]
        self._use(self._group_cuts().union(unlike), kept)

    def _separate(self, touched: Sequence[bool]) -> None:
        """Cut runs between parameters of which only one has a gradient: the other's state must not change."""
        cuts = {run.first for run in self.runs}
        unlike = {place for place in range(1, len(touched)) if touched[place] != touched[place - 1]}
        if not unlike <= cuts:
            kept: list[State] = [{} for _ in touched]
            for run, state in self._stated():
                for place in range(run.first, run.last):
                    self._add_part(kept[place], place, run, state)
            self._use(cuts | unlike, kept)

    def _add_part(self, kept: State, place: int, run: Run, state: State) -> None:
        """Add to the state of a parameter what a run has of it."""
        slot = self.slots[place]
        begin = max(slot.offset, run.begin) - run.begin
        end = max(begin, min(slot.offset + slot.numel - run.begin, run.own.numel()))
        for key, value in state.items():
            if not _is_flat(value):
                kept[key] = value
            elif key in kept:
                kept[key] = torch.cat([kept[key], value[begin:end]])
            else:
                kept[key] = value[begin:end].clone()

    def _use(self, cuts: Collection[int], kept: Sequence[State]) -> None:
        """Make the runs that begin at these places, with these states, by place."""
        firsts = sorted(cuts)
        self.runs = []
        for first, last in zip(firsts, [*firsts[1:], len(self._groups)], strict=True):
            self.runs += self._runs(first, last)
        self.optimizer = self._make([(run.group, run.own) for run in self.runs])
        for run in self.runs:
            if kept[run.first]:
                self.optimizer.state[run.own] = {
                    key: self._joined(run, key, kept) if _is_flat(value) else _copy(value)
                    for key, value in kept[run.first].items()
                }

    def _joined(self, run: Run, key: str, kept: Sequence[State]) -> Tensor:
        own = torch.zeros(run.own.numel(), dtype=kept[run.first][key].dtype, device=self.flat.device)
        for place in range(run.first, run.last):
            values, slot = kept[place][key], self.slots[place]
            at = self._own_range(slot.offset, slot.offset + slot.numel)[0] - run.begin  # of `values` in `own`
            begin, end = max(at, 0), min(at + values.numel(), own.numel())
            if begin < end:
                own[begin:end] = values[begin - at : end - at]
        return own

    def _runs(self, first: int, last: int) -> Iterator[Run]:
        """Yield at least one run, also where this rank has nothing of these parameters."""
        begin = 0 if first == 0 else self.slots[first].offset
        end = self.flat.numel() if last == len(self._groups) else self.slots[last].offset
        begin, end = self._own_range(begin, end)
        step = CACHED // self.flat.element_size() if self.flat.device.type == "cpu" else max(end - begin, 1)
        for start in range(begin, max(end, begin + 1), step):
            yield Run(self._groups[first], first, last, self.flat[start : min(start + step, end)], start)

    def _own_range(self, begin: int, end: int) -> tuple[int, int]:
        """Return begin and end of what this rank has of a range of the flat tensor."""
        begin = min(max(begin, self._begin), self._end)
        return begin, max(min(end, self._end), begin)

    def _group_cuts(self) -> set[int]:
        groups = self._groups
        return {0} | {place for place in range(1, len(groups)) if groups[place] != groups[place - 1]}


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _flattened(value: Tensor, slot: Slot) -> Tensor:
    """Return the elements of a tensor in the order in which its slot holds them, [elements]."""
    dense = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device)
    return dense.copy_(value).as_strided((slot.numel,), (1,))


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
