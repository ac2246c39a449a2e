"""Random programs train as where gradients are averaged by hand, and nothing is told: they are right."""

from __future__ import annotations

import pytest

from tests.random_programs import program
from tests.random_programs.program import Program, run

MANY = [pytest.mark.slow]
NIGHT = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    "seeds",
    [range(16), pytest.param(range(16, 150), marks=MANY), pytest.param(range(150, 3000), marks=NIGHT)],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
@pytest.mark.ranks(timeout=1800)
def test_two_ranks(rank, size, seeds, sharded):
    run(rank, size, seeds, sharded=sharded)


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(40), marks=MANY), pytest.param(range(40, 1000), marks=NIGHT)],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
@pytest.mark.ranks(size=3, timeout=1800)
def test_three_ranks(rank, size, seeds, sharded):
    run(rank, size, seeds, sharded=sharded)


def test_a_wrong_gradient_and_a_wrong_accusation_are_seen(rank, size, monkeypatch):
    """Without this, the programs could not fail."""
    backward = Program._plain_backward

    def too_much(one, loss, *, twice=False):
        backward(one, loss * 1.001, twice=twice)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "_plain_backward", too_much)
        with pytest.raises(AssertionError, match=r"(?s)seed \d+\n.*differs by"):
            run(rank, size, range(4))

    def step_on_rests(one):
        one._on_both(lambda module, optimizer: optimizer.step())

    monkeypatch.setattr(Program, "step", step_on_rests)
    monkeypatch.setattr(program, "WEIGHTS", {"train": 1.0, "train_locally": 1.0, "step": 1.0})
    with pytest.raises(AssertionError, match="DPF-L01"):
        run(rank, size, range(30))
