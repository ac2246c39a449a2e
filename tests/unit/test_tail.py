"""What a tail tells: the counts of every rank through any dtype and factor, and what is told where nothing is read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dpfuse.engine.report import ALL_WELL, Report, Tail
from dpfuse.engine.window import ELSEWHERE, TOP, Canary, Counts


class Told(Canary):
    """A canary that has counted what the test wants."""

    def __init__(self, counts):
        super().__init__()
        self.told = counts

    @property
    def counts(self):
        return self.told


def summed(every, dtype, scale, **states):
    """The tails of all ranks, each packed and added up as their elements travel; the tails have seen the sum."""
    tails = [Tail(rank, len(every), 2, scale, Told(Counts(*counts))) for rank, counts in enumerate(every)]
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(tails[0].numel, dtype=dtype)
    for rank, tail in enumerate(tails):
        told = {name: rank in ranks for name, ranks in states.items()}
        source = tail.source(dtype, torch.device("cpu"), (), told.pop("failed", False), **told)
        assert source.dtype == dtype
        total += (source.to(compute) * scale).to(dtype)
    for tail in tails:
        tail.landed(total)
    return tails


numbers = st.integers(1, TOP - 2)
counts = st.tuples(numbers, numbers, numbers, numbers)


@settings(max_examples=300, deadline=None)
@given(
    every=st.lists(st.one_of(counts, st.just(tuple(ELSEWHERE))), min_size=2, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1.0, 1 / 2, 1 / 3, 1 / 7, 1 / 1000, 1 / 60000, -1.0, 0.9]),
)
def test_all_ranks_read_what_each_has_counted(every, dtype, scale):
    tails = summed(every, dtype, scale)
    compared = {one for one in every if one != tuple(ELSEWHERE)}
    expected = Report((), (), [Counts(*one) for one in every]) if len(compared) > 1 else ALL_WELL
    for tail in tails:
        tail.canary.uneven = tuple(ELSEWHERE) in every
        assert tail.report(wait=True) == expected
        assert bool(tail.alarm()) is not expected.all_well


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4, 6, 12, 48, 1000, 60000])
def test_neighbouring_counts_differ_in_sixteen_bits(dtype, size):
    tails = [Tail(0, 1, 0, 1 / size, Told(Counts(number, 1, 1, 1))) for number in range(1, TOP + 1)]
    sources = torch.stack([tail.source(dtype, torch.device("cpu"), (), False)[0] for tail in tails])
    packed = (sources.float() * (1 / size)).to(dtype)
    assert packed.unique().numel() == TOP


@pytest.mark.parametrize("scale", [1e-6, 1e6, -1e6, 0.25])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_failures_and_changes_are_told_whatever_the_factor(dtype, scale):
    every = [(1, 1, 1, 1)] * 4
    for tail in summed(every, dtype, abs(scale), failed=[2], changed=[1, 2]):
        assert tail.report(wait=True) == Report([2], [1])
        assert tail.alarm()
    for tail in summed(every, dtype, scale):
        assert tail.report(wait=True) == ALL_WELL
        assert not tail.alarm()


def test_a_factor_that_changes_after_planning_changes_no_count():
    # Inside join() gradients are divided by the number of ranks that still have inputs.
    every = [(2, 1, 1, 1), tuple(ELSEWHERE), (3, 1, 1, 1)]
    tails = [Tail(rank, 3, 0, 1 / 3, Told(Counts(*one))) for rank, one in enumerate(every)]
    total = sum(tail.source(torch.float32, torch.device("cpu"), (), False) * (1 / 2) for tail in tails)
    for tail in tails:
        tail.landed(total)
        tail.scale = 1 / 2
        assert tail.report(wait=True).strayed == [Counts(*one) for one in every]


def test_the_flags_of_parameters_lie_behind_the_counts():
    tail = Tail(1, 2, 3, 0.5, Canary())
    tail.landed(tail.source(torch.float32, torch.device("cpu"), [1], False))
    assert tail.used_somewhere([0, 1, 2]) == {0, 2}
    assert tail.report(wait=True) == Report([], [0]), "nothing came from rank 0"


WEIGHTS = [1 / 3, 16777215.0, -3.4e38]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_was_found_and_every_weight_are_told_beside_the_rest(dtype):
    every = [(1, 1, 1, 1)] * 3
    for finders in ([], [1], [0, 1, 2]):
        tails = summed(every, dtype, 1 / 3)
        total = torch.zeros_like(tails[0]._landed)
        for rank, tail in enumerate(tails):
            packed = torch.empty_like(total)
            tail.write(packed, tail.source(dtype, torch.device("cpu"), (), False))
            tail.write_found(packed, torch.tensor(float(rank in finders)))
            tail.write_weight(packed, torch.tensor(WEIGHTS[rank]))
            total += packed
        for tail in tails:
            tail.landed(total)
            assert bool(tail.found_somewhere()) == bool(finders)
            assert torch.equal(tail.weights(), torch.tensor(WEIGHTS))
            assert tail.report(wait=True) == ALL_WELL
            assert tail.used_somewhere([0, 1]) == {0, 1}


@pytest.mark.parametrize("wait", [True, False])
def test_while_a_graph_is_captured_only_this_ranks_own_failure_is_known(wait, monkeypatch):
    tail = Tail(1, 3, 2, 0.5, Canary())
    tail.landed(torch.tensor([-1.0] + [0.1] * 26))
    assert not tail.deaf
    assert tail.report(wait=wait) == Report([0], [])
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Tail, "_read", None)  # calling it would wait for the device
    assert tail.deaf
    assert tail.report(wait=wait) == ALL_WELL
    assert tail.report(wait=wait, failed=True) == Report((1,), ())


class Operations(TorchDispatchMode):
    """Notes the names of what is called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


UPLOADS = {"index_put_", "copy_", "_to_copy", "lift_fresh"}  # on a GPU they would bring numbers from the host, and wait


@pytest.mark.parametrize("known", [True, False])
def test_what_a_captured_graph_packs_is_not_uploaded_and_not_kept(known, monkeypatch):
    canary = Told(Counts(1, 2, 3, 1))
    tail, cpu = Tail(0, 2, 3, 0.5, canary), torch.device("cpu")
    if known:
        tail.source(torch.float32, cpu, (), False)
    kept = None if tail._all_well is None else tail._all_well.clone()
    canary.told = Counts(4, 5, 6, 2)
    with monkeypatch.context() as patch, Operations() as done:
        patch.setattr("torch.cuda.is_initialized", lambda: True)
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        captured = tail.source(torch.float32, cpu, [0, 2], False)
    assert not done.names & UPLOADS
    assert (tail._all_well is None) if kept is None else torch.equal(tail._all_well, kept)
    with Operations() as done:
        eager = tail.source(torch.float32, cpu, (), False)
    assert not done.names & UPLOADS, "the host would wait whenever a count changes"
    assert captured.tolist() == [*eager.tolist()[:8], 0, 2, 0, *[0] * 9]
    assert tail.source(torch.float32, cpu, [0, 2], False).equal(captured)


def test_a_number_that_is_none_is_alarming():
    (tail, _) = summed([(1, 1, 1, 1)] * 2, torch.float32, 0.5)
    assert not tail.alarm()
    tail._landed[4] = math.nan
    assert tail.alarm()


def test_counts_start_again_before_they_reach_the_top():
    canary = Canary(wrapper=TOP)
    assert canary.counts == (1, 1, 3, 1)
    for number in range(2 * TOP):
        assert canary.counts.backwards == 1 + number % (TOP - 2) < TOP
        canary.backward_ends()
    canary.begin_window()
    assert canary.counts.backwards == 1
    canary.elsewhere = True
    assert canary.counts == ELSEWHERE
    assert math.log2(TOP).is_integer()


def test_a_forward_that_was_forgotten_is_not_counted_down_by_its_backward():
    canary = Canary()
    canary.forward_begins(counts=True)
    window = canary.began
    canary.forward_ends(watched=True)
    assert canary.counts.forwards == 2
    canary.forget_forwards()
    canary.reached(window)
    assert canary.counts.forwards == 1


def test_only_a_backward_that_comes_by_no_output_stands_for_the_forwards():
    for announced, reaches, watched, left in (
        (False, False, True, 0),
        (True, False, True, 2),
        (False, True, True, 1),
        (False, False, False, 1),  # where outputs cannot be watched no backward comes by any
    ):
        canary = Canary()
        for is_watched in (True, watched):
            canary.forward_begins(counts=True)
            window = canary.began
            canary.forward_ends(watched=is_watched)
        canary.backward_begins(announced=announced)
        if reaches:
            canary.reached(window)
        canary.gradients_accumulated()
        assert canary.counts.forwards == 1 + left


@pytest.mark.parametrize("watched", [True, False])
def test_a_forward_that_runs_a_whole_backward_counts_in_no_later_window(watched):
    canary = Canary()
    canary.forward_begins(counts=True)
    canary.begin_window()
    window = canary.began
    canary.forward_ends(watched=watched)
    canary.reached(window)
    assert canary.counts.forwards == 1
