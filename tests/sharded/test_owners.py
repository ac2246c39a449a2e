"""The assignment of whole matrices to ranks, against all assignments of short lists and against proved bounds."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from bench.large_models import Gpt2, VitLarge
from dpfuse.sharded.groups import Trainer
from dpfuse.sharded.owners import assign_owners, muon_cost


def loads_after(costs, owners, loads):
    """The load of each rank."""
    after = [*loads]
    for cost, owner in zip(costs, owners, strict=True):
        after[owner] += cost
    return after


def largest_load(costs, owners, ranks, loads=None):
    return max(loads_after(costs, owners, [0.0] * ranks if loads is None else loads))


def smallest_possible(costs, ranks, loads):
    """The largest load of the best of all assignments."""
    everything = itertools.product(range(ranks), repeat=len(costs))
    return min(max(loads_after(costs, owners, loads)) for owners in everything)


numbers = st.one_of(st.integers(0, 12).map(float), st.floats(0, 100, allow_subnormal=False))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4))
def test_a_short_list_is_near_the_best_of_all_assignments(data, ranks):
    """Longest first alone is within 4/3 of it (Graham, 1969), or 3/2 where ranks have loads already."""
    costs = data.draw(st.lists(numbers, max_size=6))
    loads = data.draw(st.one_of(st.none(), st.lists(numbers, min_size=ranks, max_size=ranks)))
    owners = assign_owners(costs, loads or [0.0] * ranks)
    best = smallest_possible(costs, ranks, loads or [0.0] * ranks)
    assert len(owners) == len(costs)
    assert all(0 <= owner < ranks for owner in owners)
    most = best * (4 / 3 if loads is None else 3 / 2)
    assert best * (1 - 1e-9) <= largest_load(costs, owners, ranks, loads) <= most * (1 + 1e-9)


def test_moves_and_swaps_improve_on_longest_first(monkeypatch):
    assert largest_load([3, 3, 2, 2, 2], assign_owners([3, 3, 2, 2, 2], [0] * 2), 2) == 6
    monkeypatch.setattr("dpfuse.sharded.owners.LOOKS", 0)
    assert largest_load([3, 3, 2, 2, 2], assign_owners([3, 3, 2, 2, 2], [0] * 2), 2) == 7


def matrices_of(model):
    """The shapes of the matrices of all blocks, without embeddings and head, which Muon does not update."""
    with torch.device("meta"):
        return [tuple(param.shape) for param in model().layers.parameters() if param.dim() == 2]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("model", "count"), [(Gpt2, 48), (VitLarge, 96)])
def test_the_matrices_of_a_model_are_within_five_percent_of_the_ideal(model, count, ranks):
    costs = [muon_cost(shape) for shape in matrices_of(model)]
    assert len(costs) == count
    ideal = max(sum(costs) / ranks, *costs)
    assert largest_load(costs, assign_owners(costs, [0] * ranks), ranks) <= 1.05 * ideal


def test_equal_items_are_dealt_evenly():
    """Ten equal items on four ranks: some rank has three of them, 20 % above the mean."""
    assert largest_load([5] * 10, assign_owners([5] * 10, [0] * 4), 4) == 15


@settings(max_examples=40, deadline=None)
@given(costs=st.lists(numbers, max_size=40), ranks=st.integers(1, 9), seed=st.integers(0, 99))
def test_asking_again_gives_the_same_owners(costs, ranks, seed):
    owners = assign_owners(costs, [0] * ranks)
    assert assign_owners(tuple(costs), [0.0] * ranks) == owners
    shuffled = random.Random(seed).sample(costs, len(costs))
    again = largest_load(shuffled, assign_owners(shuffled, [0] * ranks), ranks)
    assert again == pytest.approx(largest_load(costs, owners, ranks), rel=1e-9)


def test_ties_go_to_the_lower_index_and_the_lower_rank():
    assert assign_owners([1, 1, 1], [0] * 3) == [0, 1, 2]
    assert assign_owners([2, 1, 2, 1], [0] * 2) == [0, 0, 1, 1]
    assert assign_owners([], [0] * 2) == []


def test_loads_are_respected_and_do_not_change():
    loads = [0.0, 12.0, 4.0]
    owners = assign_owners([3, 3, 2, 2, 2], loads)
    assert 1 not in owners
    assert largest_load([3, 3, 2, 2, 2], owners, 3, loads) == 12
    assert assign_owners([1, 1], loads) == [0, 0]
    assert loads == [0.0, 12.0, 4.0]


@pytest.mark.parametrize("ranks", [pytest.param(1024, marks=pytest.mark.slow), 3])
def test_ten_thousand_items_stay_close_to_the_bound(ranks):
    generator = random.Random(3)
    costs = [generator.random() for _ in range(10_000)]
    assert largest_load(costs, assign_owners(costs, [0] * ranks), ranks) <= 1.001 * sum(costs) / ranks


@pytest.mark.parametrize("cost", [-2.0, math.nan, math.inf])
def test_costs_that_make_no_sense_are_named(cost):
    kind = type("Own", (torch.optim.SGD,), {"update_cost": staticmethod(lambda shape: cost)})
    expected = rf"update_cost of Own has returned {cost} for the shape \(2, 3\), expected a finite number"
    with pytest.raises(ValueError, match=expected):
        Trainer(kind, {}).cost((2, 3))


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (8, 8)])
def test_the_cost_of_muon_is_what_torch_computes(shape):
    param = torch.randn(shape, requires_grad=True)
    param.grad = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon([param]).step()
    assert muon_cost(shape) == counter.get_total_flops()
