"""Networks, optimizers, numbers of micro-batches and dtypes: all bits are equal on 1, 2, 3 and 4 ranks."""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.distributed.same_bits.oracle import added_in_sequence, weights_without_dpfuse
from tests.distributed.same_bits.program import OPTIMIZERS, Case, combined, trained

NETS = ("MLP", "CNN with GroupNorm", "GPT with dropout")
DTYPES = ("float32", "bfloat16")
RANKS = (1, 2, 3, 4)


def assert_same_bits(ranks, cases, timeout=60, sizes=RANKS[1:]):
    """Train all cases on one rank and on each of these numbers of ranks in turn, and return what one rank told."""
    alone = [combined(told) for told in zip(*ranks(trained, cases, size=1, timeout=timeout), strict=True)]
    for size in sizes:
        together = [combined(told) for told in zip(*ranks(trained, cases, size=size, timeout=timeout), strict=True)]
        for case, one, many in zip(cases, alone, together, strict=True):
            for what in vars(one):
                assert getattr(many, what) == getattr(one, what), f"{case}: {what} on {size} ranks"
            assert list(one.losses) == [(step, number) for step in range(case.steps) for number in range(case.count)]
    return alone


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sizes", [(3,), pytest.param((2, 4), marks=pytest.mark.slow)], ids=str)
def test_twelve_trainings_have_the_same_bits_on_any_number_of_ranks(ranks, sizes):
    kinds = [(net, optimizer, dtype) for net in NETS for optimizer in OPTIMIZERS for dtype in DTYPES]
    counts = cycle((6, 8, 4))
    cases = [Case(net, next(counts), dtype, optimizer, steps=4) for net, optimizer, dtype in kinds]
    told = assert_same_bits(ranks, cases, sizes=sizes)
    assert len({each.weights for each in told}) == len(cases)  # none has trained nothing


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", NETS)
def test_long_trainings_have_the_same_bits_on_any_number_of_ranks(ranks, net, optimizer, dtype):
    cases = [Case(net, count, dtype, optimizer, steps=200) for count in (4, 6, 8)]
    assert_same_bits(ranks, cases, timeout=900)


def test_they_are_the_bits_of_a_plain_loop_that_adds_in_the_tree(ranks):
    cases = [Case(net, count, dtype) for net in NETS[:2] for count in (6, 7) for dtype in DTYPES]
    for case, told in zip(cases, zip(*ranks(trained, cases, size=3), strict=True), strict=True):
        assert combined(told).weights == weights_without_dpfuse(case), str(case)


def test_another_order_of_addition_has_other_bits():
    """Else the tests here could not fail."""
    for case in (Case("MLP", 6), Case("CNN with GroupNorm", 8)):
        assert weights_without_dpfuse(case) != weights_without_dpfuse(case, added_in_sequence)
