"""This rank's part of the parameters of one region, with the optimizer that updates each element by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfuse.sharded.adamw_one_pass import step_in_one_pass, takes_one_pass
from dpfuse.sharded.flat_params import FlatParams
from dpfuse.sharded.groups import MASTER, ParamGroups, State, Updater

__all__ = ["ElementwiseShard", "Span"]

CACHED = 1 << 20  # bytes of a run on a CPU: an optimizer's operations, one after the other, find it in the caches


@dataclass(frozen=True)
class Span:
    """Elements of neighbouring parameters of a region, which this rank updates as one tensor.

    Args:
        group: number of the parameter group.
        first, last: places of the parameters in the region; `last` is not one of them. All ranks have the same ones.
        own: some of this rank's part of them, [elements]. It may be empty: its state still tells what states there are.
        begin: where `own` begins in the flat tensor of the parameters, in elements.
    """

    group: int
    first: int
    last: int
    own: Tensor
    begin: int


class ElementwiseShard:
    """One rank's part of a region that is cut wherever the cut falls. It has runs once `use_kept` was called.

    Args:
        groups: the number of the parameter group of each parameter, by place.

    Attributes:
        runs: in the order of the flat tensor.
        updater: of `own` of each run.
    """

    def __init__(self, flat_params: FlatParams, param_groups: ParamGroups, groups: Sequence[int]) -> None:
        self.flat_params = flat_params
        self._param_groups = param_groups
        self._groups = groups
        self._kept: dict[int, State] = {}  # states by place, until they are used
        self.runs: list[Span] = []
        self.updater = Updater(param_groups, [])

    def step(self, settings: Sequence[Mapping[str, Any]], touched: Sequence[bool]) -> None:
        """Update this rank's part with its gradients.

        Args:
            touched: whether a parameter has a gradient, by place; one without stays as it is.
        """
        flat_params = self.flat_params
        self._separate(touched)
        masters, gradients = flat_params.masters, flat_params.gradients
        grads: list[Tensor | None] = []
        for run in self.runs:
            begin = run.begin - flat_params.begin
            grads.append(gradients[begin : begin + run.own.numel()] if touched[run.first] else None)
        if masters is None:
            self.updater.step(settings, grads)
            return
        masters.follow()
        rest: list[Tensor | None] = []
        for index, (run, grad) in enumerate(zip(self.runs, grads, strict=True)):
            if grad is not None and takes_one_pass(self.updater.kind(index), settings[run.group], grad.device):
                state = self.updater.state(index)
                param = flat_params.flat[run.begin : run.begin + run.own.numel()]
                step_in_one_pass(state, settings[run.group], run.own, param, grad)
                self.updater.set_state(index, state)
                rest.append(None)
            else:
                rest.append(None if grad is None else grad.float())
        self.updater.step(settings, rest)
        if any(grad is not None for grad in rest):
            masters.write()

    def whole_states(self) -> Iterator[tuple[Tensor, State, Collection[str]]]:
        """Yield each parameter, its whole state as a plain optimizer has it, and the keys of what is divided.

        To be called on all ranks. One region's states are in memory at a time.
        """
        flat_params = self.flat_params
        kinds = {key: state[key].dtype for run, state in self._stated() for key in state if _is_flat(state[key])}
        gathered = {key: self._gathered(key, kind) for key, kind in kinds.items()}
        numbers = {place: state for run, state in self._stated() for place in range(run.first, run.last)}
        masters = None if flat_params.masters is None else flat_params.gathered(flat_params.masters.values)
        divided = {*gathered, MASTER}
        for place, param in enumerate(flat_params.params):
            state = {
                key: flat_params.in_shape(gathered[key], place) if _is_flat(value) else _copy(value)
                for key, value in numbers[place].items()
            }
            if masters is not None:
                state[MASTER] = flat_params.in_shape(masters, place)
            yield param, state, divided

    def _gathered(self, key: str, dtype: torch.dtype) -> Tensor:
        flat_params = self.flat_params
        begin, length = flat_params.begin, flat_params.end - flat_params.begin
        part = torch.zeros(length, dtype=dtype, device=flat_params.flat.device)
        for run, state in self._stated():
            if key in state:
                part[run.begin - begin : run.begin - begin + run.own.numel()] = state[key]
        return flat_params.gathered(part)

    def _stated(self) -> Iterator[tuple[Span, State]]:
        """Yield each run and its state; what is divided has one dimension there, and numbers have none."""
        for index, run in enumerate(self.runs):
            yield run, self.updater.state(index)

    def keep(self, place: int, state: State, divided: Collection[str]) -> None:
        """Cut this rank's part out of the whole state of a parameter, for `use_kept`.

        Args:
            divided: keys of values with a number for each element.
        """
        flat_params, slot = self.flat_params, self.flat_params.slots[place]
        begin, end = flat_params.own_range(slot.offset, slot.offset + slot.numel)
        cut = slice(begin - slot.offset, end - slot.offset)
        kept = {
            key: flat_params.flattened(value, place)[cut].clone() if key in divided else value
            for key, value in state.items()
        }
        master = kept.pop(MASTER, None)
        if flat_params.masters is not None:
            own = flat_params.masters.values[begin - flat_params.begin : end - flat_params.begin]
            own.copy_(flat_params.flat[begin:end] if master is None else master)
            kept = {key: value.float() if key in divided else value for key, value in kept.items()}
        self._kept[place] = kept

    def use_kept(self) -> None:
        """Use the states that were kept, in place of all that this optimizer has."""
        kept, self._kept = [self._kept.get(place, {}) for place in range(len(self._groups))], {}
        groups = self._groups
        cuts = {
            place
            for place in range(1, len(kept))
            if groups[place] != groups[place - 1] or not _same_numbers(kept[place], kept[place - 1])
        }
        self._use({0} | cuts, kept)

    def has_state(self, place: int) -> bool:
        """Whether the parameter at this place has a state; the same on all ranks."""
        return any(run.first <= place < run.last and bool(state) for run, state in self._stated())

    def forget(self, places: Collection[int]) -> None:
        """Drop the states of the parameters at these places, as if they had never been updated."""
        kept = self._states_by_place()
        for place in places:
            kept[place] = {}
        edges = {edge for place in places for edge in (place, place + 1) if edge < len(kept)}
        self._use({run.first for run in self.runs} | edges, kept)

    def _states_by_place(self) -> list[State]:
        kept: list[State] = [{} for _ in self._groups]
        for run, state in self._stated():
            for place in range(run.first, run.last):
                self._add_part(kept[place], place, run, state)
        return kept

    def _separate(self, touched: Sequence[bool]) -> None:
        """Cut runs between parameters of which only one has a gradient: the other's state must not change."""
        cuts = {run.first for run in self.runs}
        unlike = {place for place in range(1, len(touched)) if touched[place] != touched[place - 1]}
        if not unlike <= cuts:
            self._use(cuts | unlike, self._states_by_place())

    def _add_part(self, kept: State, place: int, run: Span, state: State) -> None:
        """Add to the state of a parameter what a run has of it."""
        slot = self.flat_params.slots[place]
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
        self.updater.leave(self.flat_params.rank)
        firsts = sorted(cuts)
        self.runs = []
        for first, last in zip(firsts, [*firsts[1:], len(self._groups)], strict=True):
            self.runs += self._runs(first, last)
        self.updater = Updater(self._param_groups, [(run.group, run.own) for run in self.runs])
        for index, run in enumerate(self.runs):
            if kept[run.first]:
                state = {
                    key: self._joined(run, key, kept) if _is_flat(value) else _copy(value)
                    for key, value in kept[run.first].items()
                }
                self.updater.set_state(index, state)

    def _joined(self, run: Span, key: str, kept: Sequence[State]) -> Tensor:
        flat_params = self.flat_params
        own = torch.zeros(run.own.numel(), dtype=kept[run.first][key].dtype, device=run.own.device)
        for place in range(run.first, run.last):
            values, slot = kept[place][key], flat_params.slots[place]
            at = flat_params.own_range(slot.offset, slot.offset + slot.numel)[0] - run.begin  # of `values` in `own`
            begin, end = max(at, 0), min(at + values.numel(), own.numel())
            if begin < end:
                own[begin:end] = values[begin - at : end - at]
        return own

    def _runs(self, first: int, last: int) -> Iterator[Span]:
        """Yield at least one run, also where this rank has nothing of these parameters."""
        flat_params = self.flat_params
        begin = 0 if first == 0 else flat_params.slots[first].offset
        end = flat_params.flat.numel() if last == len(self._groups) else flat_params.slots[last].offset
        begin, end = flat_params.own_range(begin, end)
        own, offset = flat_params.own, flat_params.begin
        step = CACHED // own.element_size() if own.device.type == "cpu" else max(end - begin, 1)
        for start in range(begin, max(end, begin + 1), step):
            yield Span(self._groups[first], first, last, own[start - offset : min(start + step, end) - offset], start)


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same_numbers(state: State, other: State) -> bool:
    """Whether two states that were cut have the same keys, and the same values where those are not divided."""
    return state.keys() == other.keys() and all(
        _is_flat(value) == _is_flat(other[key])
        and (_is_flat(value) or bool(torch.as_tensor(value == other[key], device="cpu").all()))
        for key, value in state.items()
    )
