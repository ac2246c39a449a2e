"""Random programs train as what stands beside them, and nothing is told: they are right."""

from __future__ import annotations

import pytest

from tests.random_programs.frozen_parts import FrozenParts
from tests.random_programs.kinds import KINDS, MESH, makes
from tests.random_programs.long_windows import LongWindows
from tests.random_programs.program import Program, run
from tests.random_programs.renamed_children import RenamedChildren
from tests.random_programs.shared_buffers import SharedBuffers

OFTEN = ("whole", "sharded")  # the kinds that three ranks train in `make test`


def cases(few, many):
    """So many seeds for `make test`, and as many more for `make test-all`; `make test-programs` runs thousands."""
    parts = [pytest.param(range(few)), pytest.param(range(few, few + many), marks=pytest.mark.slow)]
    return pytest.mark.parametrize("seeds", parts, ids=lambda seeds: f"{seeds.start}-{seeds.stop}")


@pytest.mark.parametrize("kind", KINDS)
@cases(1, 149)
@pytest.mark.ranks(timeout=1800)
def test_two_ranks(rank, size, seeds, kind):
    run(seeds, makes(kind, rank, size))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow) for kind in KINDS]
)
@cases(1, 39)
@pytest.mark.ranks(size=3, timeout=1800)
def test_three_ranks(rank, size, seeds, kind):
    run(seeds, makes(kind, rank, size))


@pytest.mark.slow
@pytest.mark.ranks(size=4, timeout=1800)
@pytest.mark.parametrize("seeds", [range(1), range(1, 40)], ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_four_ranks_in_a_mesh(rank, size, seeds):
    run(seeds, makes(MESH, rank, size))


def test_a_wrong_gradient_and_a_wrong_accusation_are_seen(rank, size, monkeypatch):
    """Without this, the programs could not fail."""
    backward = Program._plain_backward

    def too_much(one, loss, *, twice=False):
        backward(one, loss * 1.001, twice=twice)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "_plain_backward", too_much)
        with pytest.raises(AssertionError, match=r"(?s)seed \d+\n.*differs by"):
            run(range(4), makes("whole", rank, size))

    def step_on_rests(one):
        one._on_both(lambda module, optimizer: optimizer.step())

    monkeypatch.setattr(Program, "step", step_on_rests)
    monkeypatch.setattr(Program, "weights", {"train": 1.0, "train_locally": 1.0, "step": 1.0})
    with pytest.raises(AssertionError, match="DPF-L01"):
        run(range(30), makes("whole", rank, size))


def _backward_of_more(method):
    return lambda one, loss: method(one, loss * 1.001)


def _loss_of_more(method):
    return lambda one, side, out: method(one, side, out * (1 + side))


def _one_batch_less(method):
    return lambda one, kind: [number - one.rank for number in method(one, kind)]


def _state_of_others(method):
    return lambda one, tree, prefix: {key: value + 1 for key, value in method(one, tree, prefix).items()}


PLANTED = {
    "frozen parts": (FrozenParts, "_plain_backward", _backward_of_more),
    "shared buffers": (SharedBuffers, "_loss", _loss_of_more),
    "long windows": (LongWindows, "_counts", _one_batch_less),
    "renamed children": (RenamedChildren, "_old", _state_of_others),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_each_kind_sees_a_defect(rank, size, monkeypatch, kind):
    made, name, plant = PLANTED[kind]
    monkeypatch.setattr(made, name, plant(getattr(made, name)))
    with pytest.raises(AssertionError, match=r"seed \d+\n"):
        run(range(4), makes(kind, rank, size))
