"""Clipping, schedulers, loss scaling, unused and frozen parameters, bucket sizes: what else a training may have."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

from tests.distributed.same_bits.program import Case, Told, Unused, combined, digest, trained

PLAIN = Case("MLP", 5, steps=3)
CHANGING = ("clipped by torch", "clipped by the wrapper", "scheduler", "GradScaler")
KEEPING = ("small buckets", "no views")


def told(ranks, cases, sizes=(1, 3)) -> list[Told]:
    """Train all cases on these numbers of ranks, which must tell the same, and return it."""
    first, *others = (
        [combined(each) for each in zip(*ranks(trained, cases, size=size), strict=True)] for size in sizes
    )
    for size, other in zip(sizes[1:], others, strict=True):
        for case, one, many in zip(cases, first, other, strict=True):
            assert many == one, f"{case} on {size} ranks"
    return first


def test_clipping_schedulers_and_loss_scaling_give_the_same_bits_on_any_number_of_ranks(ranks):
    cases = [PLAIN, *(replace(PLAIN, variation=each) for each in CHANGING)]
    plain, by_torch, by_wrapper, scheduled, scaled = told(ranks, cases)
    for clipped in (by_torch, by_wrapper):
        assert min(map(float.fromhex, clipped.norms)) > 0.05  # each step was clipped
    assert len({each.weights for each in (plain, by_wrapper, scheduled, scaled)}) == 4
    assert by_torch.weights != plain.weights
    scales = list(map(float.fromhex, scaled.norms))
    assert scales[1] < scales[0]  # a step was skipped
    assert math.isfinite(scales[-1])


def test_neither_bucket_sizes_nor_views_change_a_bit(ranks):
    plain, *others = told(ranks, [PLAIN, *(replace(PLAIN, variation=each) for each in KEEPING)])
    for other in others:
        assert other == plain


def test_parameters_that_some_micro_batches_use_or_none_have_the_same_bits_on_any_number_of_ranks(ranks):
    counts = (4, 5, 8)
    cases = [
        Case("branches", count, steps=3, variation=variation)
        for variation in ("unused", "unused, small buckets")
        for count in counts
    ]
    results = told(ranks, cases, sizes=(1, 2, 3, 4))
    assert results[:3] == results[3:]


def parts_that_moved(rank, size, count):
    training = Unused(Case("branches", count, steps=2, variation="unused"))
    before = copy.deepcopy(training.model.module)
    training.run()
    pairs = zip(before.named_children(), training.model.module.children(), strict=True)
    return [name for (name, one), other in pairs if digest(one.parameters()) != digest(other.parameters())]


def test_a_parameter_that_no_micro_batch_uses_stays_as_it_was(ranks):
    for moved in ranks(parts_that_moved, 4, size=2):
        assert moved == ["common", "of_one", "of_most"]
