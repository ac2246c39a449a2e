"""A parameter that changes its stream in a late step: its bucket still waits for its gradient, in every schedule.

A model settles with each parameter on one stream. Then, in single steps, one or two parameters run on another stream.
Nothing announces that: decision 0020 says why each gradient on a GPU has a hook in Python that notes its stream. Each
rule that would need no such hook fails here.
"""

from __future__ import annotations

import random

import pytest
import torch

import dpfuse
from dpfuse.engine.streams import WritingStreams
from tests.cuda_model import RaceError
from tests.unit.test_stream_races import LAYERS, NUMEL, SIZES, Loss, cuda, wrapped  # noqa: F401  # a fixture

# Of 10,000 schedules, how many each kind of delivery gets, and after how many the model is wrapped anew.
SCHEDULES = {"views": 4000, "private": 3000, "accumulated": 3000}
EACH = 50


def change_streams(cuda, kind, schedules, monkeypatch, *, first=0, changed=(1, 1, 2)):  # noqa: F811
    """Train in so many schedules, each of which moves as many parameters as is drawn from `changed`.

    Every gradient must be that of one rank, because both ranks have the same.
    """
    for seed in range(first, first + schedules, EACH):
        draw = random.Random(seed)
        model = wrapped(cuda, kind, draw.choice(SIZES[:2]), monkeypatch)
        sides = [cuda.main, *(cuda.Stream(f"side {number}") for number in range(3))]
        settled = [draw.choice(sides) for _ in range(LAYERS)]
        with cuda:
            for _ in range(3):
                step(cuda, model, settled, draw)
            for _ in range(EACH):
                used = list(settled)
                for index in draw.sample(range(LAYERS), draw.choice(changed)):
                    used[index] = draw.choice([side for side in sides if side is not settled[index]])
                step(cuda, model, used, draw)
                if draw.random() < 0.2:
                    step(cuda, model, settled, draw)


def step(cuda, model, used, draw):  # noqa: F811
    inputs = [torch.full((NUMEL,), float(draw.randrange(1, 9))) for _ in used]
    Loss.apply(model(inputs, cuda, used), cuda, used).backward()
    for weight, x in zip(model.module.weights, inputs, strict=True):
        assert torch.equal(weight.grad, x)
    model.zero_grad(set_to_none=draw.random() < 0.7)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_some_schedules(kind, cuda, monkeypatch):  # noqa: F811
    change_streams(cuda, kind, 2 * EACH, monkeypatch, first=10**6)
    assert cuda.compared > 1000


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.timeout(1200)
def test_ten_thousand_schedules(kind, cuda, monkeypatch):  # noqa: F811
    change_streams(cuda, kind, SCHEDULES[kind], monkeypatch)


# --- Rules that need no hook on each parameter ---


def waiting_for_no_stream(monkeypatch):
    monkeypatch.setattr(WritingStreams, "noting", lambda self, marker: marker)


def waiting_for_the_streams_of_the_first_backward(monkeypatch, *, notes_sentinel=False):
    """Each bucket notes streams in its first backward alone, and waits for these in all backwards."""
    known: dict[WritingStreams, dict[int, None]] = {}
    noting, precede = WritingStreams.noting, WritingStreams.precede

    def noting_at_first(self, marker):
        note = noting(self, marker)
        if notes_sentinel and getattr(marker, "__name__", "") == "mark_sentinel":
            return note
        return lambda param: (marker if self in known else note)(param)

    def precede_all(self):
        self._noted |= known.setdefault(self, dict(self._noted))
        return precede(self)

    monkeypatch.setattr(WritingStreams, "noting", noting_at_first)
    monkeypatch.setattr(WritingStreams, "precede", precede_all)


def waiting_for_the_stream_of_the_sentinel_too(monkeypatch):
    """As the rule before, but the gradient that comes last notes its stream in each backward."""
    waiting_for_the_streams_of_the_first_backward(monkeypatch, notes_sentinel=True)


LEARNING = [waiting_for_the_streams_of_the_first_backward, waiting_for_the_stream_of_the_sentinel_too]


@pytest.mark.parametrize("kind", ["views", "private"])
@pytest.mark.parametrize("broken", [waiting_for_no_stream, *LEARNING])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_each_rule_without_the_hook_fails(broken, kind, cuda, monkeypatch):  # noqa: F811
    broken(monkeypatch)
    with pytest.raises((RaceError, dpfuse.DPFuseError), match="does not wait for it"):
        change_streams(cuda, kind, 10 * EACH, monkeypatch)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", LEARNING)
def test_rules_that_learn_streams_fail_for_nothing_but_changes(rule, cuda, monkeypatch):  # noqa: F811
    rule(monkeypatch)
    change_streams(cuda, "views", EACH, monkeypatch, changed=(0,))
