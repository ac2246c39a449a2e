"""The loop of a rank over its micro-batches, of a fixed number in each step. It sets seeds, and finds wrong loops."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dpfuse.arguments import integer
from dpfuse.comm import collective
from dpfuse.engine.feature import Engine, Feature
from dpfuse.engine.inner_tensors import memory_of
from dpfuse.engine.micro_batches import MicroBatches
from dpfuse.engine.random_states import seed_by
from dpfuse.engine.report_layout import Field
from dpfuse.engine.sync_decision import Window
from dpfuse.engine.tensor_hash import joined
from dpfuse.errors import DPFuseError
from dpfuse.model.buffers import travelling_parts
from dpfuse.model.check import bits_of

__all__ = ["MicroLoop", "common_seed", "refuse_without_group", "set_threads"]

THREADS = "DPFUSE_THREADS"  # the variable that asks for more than one thread
COMPARED = 2  # steps, the first of each mode, in which buffers are compared by value, and
COMPARED_EVERY = 64  # one in so many after them

_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True)
class _Written:
    """A buffer, and what tells that it was written since."""

    buffer: Tensor
    version: int  # 0 for one that torch does not count
    value: int  # the hash of its bits; 0 where it is not compared

    def is_that(self, other: _Written | None) -> bool:
        """Whether the buffer is the same as far as this is known, with the same value."""
        return (
            other is not None
            and self.buffer is other.buffer
            and (self.version, self.value) == (other.version, other.value)
        )


@dataclass(eq=False)
class _Loop:
    """One loop over the micro-batches of a step."""

    params: Sequence[nn.Parameter] = ()  # that are averaged, or were frozen when it began
    trains: Sequence[bool] = ()  # whether each of them required gradients then
    is_done: bool = False  # whether its gradients are averaged, or were thrown away


class MicroLoop(Feature):
    """Deals the micro-batches of each step, in which it lets the last backward of each rank synchronise.

    All ranks must be in the same step when gradients are averaged. A loop that leaves out a micro-batch, or takes one
    twice, is an error on this rank; its peers hear of it as of any rank that has failed.

    Args:
        window: of the model; it never synchronises but in the last backward of a loop.

    Attributes:
        steps: how many are done; the next loop has the seeds of this one.
        seed: of the training.
        threads: with which torch computes on all ranks.
    """

    _engine: Engine

    def __init__(
        self,
        deal: MicroBatches,
        rank: int,
        module: nn.Module,
        window: Window,
        *,
        seed: int,
        steps: int,
        threads: int,
    ) -> None:
        self.deal = deal
        self.steps = steps
        self.seed = seed
        self.threads = threads
        self._rank = rank
        self._module = module
        self._window = window
        self._loop = _Loop(is_done=True)
        self._with_buffers = [
            (f"{name}." if name else "", layer)
            for name, layer in module.named_modules()
            if layer._buffers.keys() - layer._non_persistent_buffers_set
        ]
        self._buffers: dict[str, _Written] = {}  # of the layers, when the loop began
        self._modes: list[bool] = []  # of the same layers, whether they train
        self._quiet = 0  # steps since a mode changed, or a buffer was written
        self._sends = False  # whether the backward that runs synchronises
        window.require_sync = False

    def join(self, engine: Engine) -> None:
        """As `Feature.join`."""
        self._engine = engine
        engine.layout.compare(
            Field(
                "micro-batch step",
                lambda: self.steps,
                lambda number: f"averages the micro-batches of step {number}",
                "Run one loop over micro_batches() in each step on every rank, and pass the same step where you pass "
                "one.",
            )
        )

    @property
    def in_last(self) -> bool:
        """Whether the last micro-batch of this rank runs, whose backward synchronises."""
        return self.deal.number == self.deal.of(self._rank)[-1]

    def numbers(self, step: int | None) -> Iterator[int]:
        """As `micro_batches` of the wrapper."""
        if not self._loop.is_done:
            number = self.deal.number
            self.throw_away()
            left = "before it began" if number is None else f"at micro-batch {number}"
            raise DPFuseError(
                f"rank {self._rank}: the loop over micro_batches() before this one was left {left}, "
                f"expected all of {_listed(self.deal.of(self._rank))}. Run each loop to its end. Call zero_grad() of "
                "the wrapper before you begin a step again, on this rank or on all."
            )
        threads = torch.get_num_threads()
        if threads != self.threads:
            raise DPFuseError(
                f"rank {self._rank}: torch computes with {threads} threads, expected {self.threads} as when the module "
                f"was wrapped, since sums in several threads have other bits. Set {THREADS} before you start the "
                "program, and leave torch.set_num_threads() alone."
            )
        for param in self._engine.params:
            if param.grad is not None:
                raise DPFuseError(
                    f"rank {self._rank}: {self._name(param)} has a gradient at the beginning of micro_batches(), "
                    "expected None: each rank would add it to its own. Call zero_grad() after each step, with "
                    "set_to_none=True, its default: that of the wrapper also knows parameters that no optimizer has."
                )
        if step is not None:
            self.steps = integer("step", step, 0)
        self._loop = loop = self._begin()
        self._window.begin_again()
        self.deal.lost = False
        modes = [layer.training for _, layer in self._with_buffers]
        if modes != self._modes:
            self._modes, self._quiet = modes, 0
        self._buffers = self._written_buffers()
        return self._run(loop)

    def _begin(self) -> _Loop:
        frozen = [param for param in self._module.parameters() if not param.requires_grad]  # it may be unfrozen
        params = [*self._engine.params, *frozen]
        return _Loop(params, list(map(_requires_grad, params)))

    def _run(self, loop: _Loop) -> Iterator[int]:
        deal, own = self.deal, self.deal.of(self._rank)
        step = self.steps
        for number in own:
            deal.number, deal.ended = number, False
            self._window.require_sync = number == own[-1]
            seed_by(self.seed, step, number)
            try:
                yield number
            except GeneratorExit:  # Python closes it where zip() or a break ends the loop
                if loop is self._loop and loop.is_done and number == own[-1]:
                    self._seed_after(step)
                raise
            if loop is not self._loop or (loop.is_done and number != own[-1]):
                raise DPFuseError(
                    f"rank {self._rank}: the loop over micro_batches() goes on after micro-batch {number}, but it has "
                    "ended; expected no other loop, and no zero_grad() or discard_accumulated() of the wrapper inside "
                    "of it. Zero gradients after the optimizer's step."
                )
            self._refuse_frozen()
            if not deal.ended:
                raise DPFuseError(
                    f"rank {self._rank}: micro-batch {number} had no backward that has reached a parameter, expected "
                    "one for each. Call backward() in each turn of the loop over micro_batches(). Where one has "
                    "nothing to learn from, multiply its loss by 0."
                )
        self._seed_after(step)

    @torch.no_grad()
    def gather(self, values: Sequence[float | Tensor]) -> Tensor:
        """As `gather_micro_batches` of the wrapper."""
        self.refuse_inside("gather_micro_batches() was called")
        own, group = self.deal.of(self._rank), self._engine.group
        device = self._engine.params[0].device
        # The first number tells how many values there are: all ranks raise the same error.
        row = torch.zeros(1 + len(self.deal.of(0)), dtype=torch.float64, device=device)
        row[0] = _count_of(values)
        for place, value in enumerate(values[: len(own)] if row[0] >= 0 else ()):
            row[1 + place] = torch.as_tensor(value).reshape(())
        rows = torch.stack(collective.all_gather(row, group))
        counts = [len(self.deal.of(rank)) for rank in range(self.deal.ranks)]
        for rank, (given, wanted) in enumerate(zip(rows[:, 0].tolist(), counts, strict=True)):
            if given != wanted:
                kind = f", but a {type(values).__name__}" if rank == self._rank else ""
                got = f"values that are no list of single numbers{kind}" if given < 0 else f"{int(given)} values"
                raise DPFuseError(
                    f"rank {self._rank}: rank {rank} has given {got} to gather_micro_batches(), expected {wanted} "
                    "numbers, one for each of its micro-batches. Append one in each turn of the loop."
                )
        return torch.cat([one[1 : 1 + count] for one, count in zip(rows, counts, strict=True)])

    def _seed_after(self, step: int) -> None:
        """Let all ranks draw the same after a loop, whichever micro-batches they had."""
        self.deal.number = None
        seed_by(self.seed, step, self.deal.count)

    def throw_away(self) -> None:
        """End the loop that runs, if one does, and drop what was added up."""
        self._loop.is_done = True
        self._window.require_sync = False
        self.deal.number = None
        self._engine.reducer.accumulation.forget()
        self._window.begin_again()
        self._window.forget_requests()  # else the first backward of the next loop would synchronise
        self._window.forget_forwards()
        self.deal.lost = False

    def refuse_inside(self, what: str) -> None:
        """Raise DPFuseError if `what` was done while a loop has not averaged its gradients."""
        if not self._loop.is_done:
            raise DPFuseError(
                f"rank {self._rank}: {what} {self._place}, before the gradients of all of "
                f"{_listed(self.deal.of(self._rank))} were added up and averaged. Finish the loop over "
                "micro_batches() first."
            )

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """As `Watcher.backward_begins`."""
        self._sends = sync
        if sync and not self.in_last:
            raise DPFuseError(
                f"rank {self._rank}: a backward would synchronise {self._place}, expected that of "
                f"micro-batch {self.deal.of(self._rank)[-1]} alone. Run the forward and the backward of each "
                "micro-batch in the same turn of the loop over micro_batches()."
            )
        if sync and (self.deal.lost or self._window.died):
            self._refuse_frozen()  # buckets are made again for a parameter that was unfrozen
            raise DPFuseError(
                f"rank {self._rank}: gradients of micro-batches of this step were lost, because a backward has failed, "
                "or buckets were made again, inside of the loop over micro_batches(). Call zero_grad() of the "
                "wrapper, and begin the loop again."
            )

        if sync:
            self.deal.lost = True  # until it is delivered: if it fails, the sums are lost

    def local_backward_ended(self, *, added: bool) -> None:
        """As `Watcher.local_backward_ended`."""
        if added:
            self.deal.ended = True
            self._refuse_frozen()
        elif self._sends:
            self.deal.lost = False  # nothing was sent

    def delivered(self) -> None:
        """As `Watcher.delivered`.

        Raises:
            DPFuseError: a forward has written a buffer, or a parameter was frozen or unfrozen.
        """
        self.deal.ended, self.deal.lost = True, False
        self._loop.is_done = True
        self._window.require_sync = False
        self.steps += 1
        self._refuse_frozen()
        before, now = self._buffers, self._written_buffers()
        self._quiet += 1
        for name in {**before, **now}:
            if name not in before or not before[name].is_that(now.get(name)):
                self._quiet = 0
                raise DPFuseError(
                    f"rank {self._rank}: the buffer {name!r} was written while micro-batches ran, expected none: each "
                    "rank has other micro-batches, so buffers would depend on the number of ranks. Use layers without "
                    "running statistics, such as GroupNorm, call eval() of the layer, or write it after the loop."
                )

    def _refuse_frozen(self) -> None:
        """Raise DPFuseError if a parameter was frozen or unfrozen since the loop began.

        A backward that only computes gradients with `torch.autograd.grad` may do that, and undo it.
        """
        loop = self._loop
        if list(map(_requires_grad, loop.params)) == loop.trains:
            return
        param, trained = next(
            (param, trained)
            for param, trained in zip(loop.params, loop.trains, strict=True)
            if param.requires_grad != trained
        )
        raise DPFuseError(
            f"rank {self._rank}: {self._name(param)} was {'frozen' if trained else 'unfrozen'} {self._place}, expected "
            f"the same requires_grad in all of {_listed(self.deal.of(self._rank))}: each rank has other micro-batches, "
            "so gradients would depend on the number of ranks. Change requires_grad between two loops, on every rank."
        )

    def before_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.before_step`."""
        if self._loop.is_done:
            return
        own = set(map(id, self._engine.params))
        if any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
            self.refuse_inside(f"{type(optimizer).__name__}.step() was called")

    def _name(self, wanted: Any) -> str:
        names = (name for name, param in self._module.named_parameters() if param is wanted)
        return f"the parameter {next(names, '?')!r}"

    @property
    def _place(self) -> str:
        return "before the first micro-batch" if self.deal.number is None else f"at micro-batch {self.deal.number}"

    def _written_buffers(self) -> dict[str, _Written]:
        """Return the buffers of the state dict by name.

        Batch norm in C++, NumPy and writes to `.data` do not move the version, so values are compared now and then.
        """
        found = {
            f"{prefix}{name}": buffer
            for prefix, layer in self._with_buffers
            for name, buffer in layer._buffers.items()
            if buffer is not None and name not in layer._non_persistent_buffers_set
        }
        compared = self._quiet < COMPARED or self._quiet % COMPARED_EVERY == 0
        return {
            name: _Written(buffer, 0 if buffer.is_inference() else buffer._version, _hash_of(buffer) if compared else 0)
            for name, buffer in found.items()
        }


def _hash_of(buffer: Tensor) -> int:
    """Return the hash of the bits of a buffer, which is 0 where they cannot be read."""
    return int(joined(bits_of(memory_of(part)) for part in travelling_parts(buffer).values()))


def refuse_without_group(count: int) -> None:
    """Raise ValueError: without a process group the wrapper would only pass calls through."""
    raise ValueError(
        f"fixed_micro_batches={count} was passed without a process group, expected one, also of one rank. Call "
        "dpfuse.init_parallel_env() before wrapping, and start the program with the launcher."
    )


def set_threads() -> int:
    """Let torch compute with one thread, or as many as the environment asks for, and return their number.

    Raises:
        ValueError: the variable is no number of at least 1.
    """
    text = os.environ.get(THREADS, "1")
    if not (text.isdecimal() and int(text) >= 1):
        raise ValueError(f"{THREADS} must be a whole number of at least 1, got {text!r}; leave it out for one thread")
    if torch.get_num_threads() != int(text):
        torch.set_num_threads(int(text))
    return int(text)


def common_seed(group: dist.ProcessGroup) -> int:
    """Return the seed with which torch's generator was seeded on rank 0 last; to be called on all ranks."""
    seed = torch.tensor(torch.initial_seed() & (2**62 - 1), device=collective.group_device(group))
    collective.broadcast(seed, group)
    return int(seed)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _count_of(values: Sequence[float | Tensor]) -> int:
    """Return how many numbers these are; -1 where one is no single number, or this is no list of them."""
    try:
        return len(values) if all(torch.as_tensor(value).numel() == 1 for value in values) else -1
    except (TypeError, ValueError, RuntimeError):
        return -1
