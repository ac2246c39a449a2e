"""A walk over the table of a backward on three ranks, beside a model in words: states, errors, counts and sums."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dpfuse
from dpfuse.engine.backward_table import TRANSITIONS, Action, Event, State
from tests.ranks import RankError

SIZE = 3
KINDS = ("sync", "local", "fails", "fails locally", "fails in the loss", "fails locally in the loss")
KINDS += ("grad", "direct", "replace")
WEIGHTS = (6, 5, 2, 1, 2, 1, 1, 1, 1)


class PlantedError(Exception):
    """What user code raises."""


class Spy(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


class Net(nn.Module):
    """Its gradients are small whole numbers, whose sums are exact."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x, seen: Callable[[], None] = lambda: None) -> Tensor:
        return Spy.apply((self.a + 2 * self.b) * x, seen)


# --- What is expected, in words ---


@dataclass
class Rank:
    """One rank, as the model sees it."""

    sum: int = 0  # of what it has added to its gradients since they were averaged or zeroed
    backwards: int = 0  # local ones in this window


@dataclass
class Seen:
    """What a rank sees of one event."""

    error: str = ""
    inside: str = ""  # the state while the backward runs
    after: str = "IDLE"
    grad: int = 0  # of `a`, before the program zeroes it
    completed: int = 0
    open: bool = False


@dataclass
class Model:
    """All ranks, in words: no table, no bucket."""

    ranks: list[Rank] = field(default_factory=lambda: [Rank() for _ in range(SIZE)])
    completed: int = 0
    first: bool = True
    changed: bool = False
    asked: bool = False  # whether a forward outside of no_sync() has had no averaged backward yet
    failed: tuple[int, str, bool] | None = None  # a rank that has not completed its failure, its state, and its window

    def event(self, kind: str, x: int, failing: int) -> list[Seen]:
        """Return what each rank sees. Rank r has the batch x + r."""
        state = "CHANGED" if self.changed else "RECORDING" if self.first else "REDUCING"
        seen = [Seen() for _ in self.ranks]
        self.failed = self.failed if kind == "replace" else None
        is_local = "local" in kind and not self.asked
        if kind == "replace":
            self.changed = True
        elif kind == "grad":
            self.asked = True
            for each in seen:
                each.inside = state
        elif is_local:
            self.add_locally(seen, kind, x, failing)
        elif "fails" in kind:
            for number, each in enumerate(seen):
                each.error = "PlantedError" if number == failing else "DPFuseError"
                each.inside = "" if number == failing and "loss" in kind else state
            self.failed = failing, "IDLE" if "loss" in kind else "ABANDONED", self.ranks[failing].backwards > 0
            self.begin_window()
        elif len({rank.backwards for rank in self.ranks}) > 1:
            for each in seen:
                each.error, each.inside = "DPFuseError", "" if kind == "direct" else state
            self.first, self.changed = self.first or self.changed, False  # they have agreed on the change before
            self.begin_window()
        else:
            total = sum(rank.sum + x + number for number, rank in enumerate(self.ranks))
            for each in seen:
                each.grad, each.inside = total, "" if kind == "direct" else state
            self.completed += 1
            self.first = self.changed = False
            self.begin_window()
        for each, rank in zip(seen, self.ranks, strict=True):
            each.completed, each.open = self.completed, rank.backwards > 0
            each.grad = 0 if each.error else each.grad or rank.sum
        if self.failed is not None:
            number, seen[number].after, seen[number].open = self.failed
        return seen

    def add_locally(self, seen: list[Seen], kind: str, x: int, failing: int) -> None:
        for number, (each, rank) in enumerate(zip(seen, self.ranks, strict=True)):
            each.inside = "LOCAL"
            if "fails" in kind and number == failing:
                each.error, each.inside = "PlantedError", "" if "loss" in kind else "LOCAL"
                rank.sum = rank.backwards = 0
            else:
                rank.sum, rank.backwards = rank.sum + x + number, rank.backwards + 1

    def begin_window(self) -> None:
        self.ranks, self.asked = [Rank() for _ in self.ranks], False


# --- What happens ---


class Program:
    """One rank of a training."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = dpfuse.DataParallel(Net(), None, 1e-6, 1e-6, gradient_scale=1.0, check_training="off")
        self.inside: list[str] = []

    def event(self, kind: str, x: int, failing: int) -> Seen:
        reducer, window, self.inside = self.model.reducer, self.model._sync.window, []
        error = ""
        try:
            self.run(kind, x + self.rank, fails="fails" in kind and failing == self.rank)
        except (PlantedError, dpfuse.DPFuseError) as raised:
            error = type(raised).__name__
        grad = self.model.module.a.grad
        seen = Seen(
            error,
            "".join(self.inside),
            reducer.state.name,
            0 if grad is None or error else int(grad[0]),
            reducer.completed,
            window.is_open,
        )
        if error or seen.completed > self.completed:
            self.model.zero_grad()
        self.completed = seen.completed
        return seen

    completed = 0

    def run(self, kind: str, x: int, *, fails: bool) -> None:
        model = self.model
        if kind == "replace":
            model.module.b = nn.Parameter(torch.zeros(4))
            return
        if kind == "direct":
            net = model.module
            ((net.a + 2 * net.b) * x).sum().backward()
            return

        def look() -> None:
            self.inside.append(model.reducer.state.name)
            if fails and "loss" not in kind:
                raise PlantedError

        def explode() -> None:
            if fails:
                raise PlantedError

        with model.no_sync("local" in kind):
            out = model(x, look)
            loss = Spy.apply(out.sum(), explode) if "loss" in kind else out.sum()
            if kind == "grad":
                torch.autograd.grad(loss, model.module.a)
            else:
                loss.backward()


def script(seed: int, count: int) -> list[tuple[str, int, int]]:
    """Return events that are the same on all ranks: what happens, with which batch, and the rank that fails."""
    chance = random.Random(seed)
    return [(*chance.choices(KINDS, WEIGHTS), chance.randrange(1, 9), chance.randrange(SIZE)) for _ in range(count)]


def walk(rank: int, size: int, seed: int, count: int, wrong: dict = {}) -> int:  # noqa: B006  # it is not changed
    table = {pair: (Action[action], State[after]) for pair, (action, after) in wrong.items()}
    changed = {(State[state], Event[event]): value for (state, event), value in table.items()}
    expected, events = Model(), 0
    with mock.patch.dict(TRANSITIONS, changed):
        program = Program(rank)
        for place, (kind, x, failing) in enumerate(script(seed, count)):
            if kind == "replace" and any(each.sum or each.backwards for each in expected.ranks):
                continue  # what was accumulated for the parameter before is lost to the program
            if kind == "direct" and expected.changed:
                continue  # only a forward looks at the module
            wanted = expected.event(kind, x, failing)[rank]
            got = program.event(kind, x, failing)
            assert got == wanted, (place, kind, x, failing, got, wanted)
            events += 1
        program.event("sync", 1, 0)  # completes what the last one has left
    return events


def test_a_walk_is_as_the_words_say(ranks):
    assert min(ranks(walk, 0, 200, size=SIZE, timeout=60)) > 150


@pytest.mark.slow
def test_ten_thousand_events_are_as_the_words_say(ranks):
    events = 0
    for seed in range(1, 41):
        events += ranks(walk, seed, 280, size=SIZE, timeout=60)[0]
    assert events >= 10_000


WRONG = {
    "an average is not counted": {("REDUCING", "AVERAGED"): ("FORGET", "IDLE")},
    "a local backward begins the window again": {("LOCAL", "ENDED"): ("FORGET", "IDLE")},
    "what is completed counts as averaged": {("ABANDONED", "COMPLETED"): ("COUNT", "IDLE")},
    "an error of all ranks is not forgotten": {("REDUCING", "REFUSED"): ("LEAVE", "IDLE")},
    "the average of a changed model is not counted": {("CHANGED", "AVERAGED"): ("FORGET", "IDLE")},
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_entry_is_found(ranks, wrong):
    with pytest.raises(RankError, match="AssertionError"):
        ranks(walk, 0, 200, WRONG[wrong], size=SIZE, timeout=60)
