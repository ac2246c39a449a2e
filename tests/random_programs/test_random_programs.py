"""Random programs train as where gradients are averaged by hand, and nothing is told: they are right."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests.random_programs.mesh_programs import MeshProgram
from tests.random_programs.program import Program, run
from tests.random_programs.several_models import SeveralModels

KINDS = {
    "whole": partial(Program, sharded=False),
    "sharded": partial(Program, sharded=True),
    "several models": SeveralModels,
}


def cases(few, many, night):
    """So many seeds for `make test`, as many more for `make test-all`, and for the night."""
    marks = [[], [pytest.mark.slow], [pytest.mark.slow, pytest.mark.nightly]]
    ends = [0, few, few + many, few + many + night]
    parts = [pytest.param(range(*pair), marks=each) for pair, each in zip(pairwise(ends), marks, strict=True)]
    return pytest.mark.parametrize("seeds", parts, ids=lambda seeds: f"{seeds.start}-{seeds.stop}")


@pytest.mark.parametrize("kind", KINDS)
@cases(6, 144, 2850)
@pytest.mark.ranks(timeout=1800)
def test_two_ranks(rank, size, seeds, kind):
    run(seeds, partial(KINDS[kind], rank, size))


@pytest.mark.parametrize("kind", KINDS)
@cases(2, 38, 960)
@pytest.mark.ranks(size=3, timeout=1800)
def test_three_ranks(rank, size, seeds, kind):
    run(seeds, partial(KINDS[kind], rank, size))


@cases(1, 39, 960)
@pytest.mark.ranks(size=4, timeout=1800)
def test_four_ranks_in_a_mesh(rank, size, seeds):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    run(seeds, partial(MeshProgram, mesh))


def test_a_wrong_gradient_and_a_wrong_accusation_are_seen(rank, size, monkeypatch):
    """Without this, the programs could not fail."""
    backward = Program._plain_backward

    def too_much(one, loss, *, twice=False):
        backward(one, loss * 1.001, twice=twice)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "_plain_backward", too_much)
        with pytest.raises(AssertionError, match=r"(?s)seed \d+\n.*differs by"):
            run(range(4), partial(Program, rank, size, sharded=False))

    def step_on_rests(one):
        one._on_both(lambda module, optimizer: optimizer.step())

    monkeypatch.setattr(Program, "step", step_on_rests)
    monkeypatch.setattr(Program, "weights", {"train": 1.0, "train_locally": 1.0, "step": 1.0})
    with pytest.raises(AssertionError, match="DPF-L01"):
        run(range(30), partial(Program, rank, size, sharded=False))
