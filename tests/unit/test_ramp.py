"""The ramp: small buckets at both ends of the order, within the caps; and the first plan knows nothing of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.size_list import SIZE_LISTS, load
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import MB, BucketRule, plan_buckets, rebuild_plan
from dpfuse.engine.ramp import ramp_limits

KB = 1 << 10


@pytest.mark.parametrize("total", [256 * KB, MB, 7 * MB + 12, 100 * MB, 1340 * MB])
@pytest.mark.parametrize("cap", [MB / 4, 3.5 * MB, 25 * MB, 1000 * MB])
@pytest.mark.parametrize("last_cap", [0, 100 * KB, MB, 25 * MB, math.inf])
@pytest.mark.parametrize("ranks", [1, 2, 8, 100])
def test_limits_rise_and_fall_within_the_caps(total, cap, last_cap, ranks):
    limits = ramp_limits(total, cap, last_cap, ranks)
    if total < 256 * KB * math.sqrt(max(1, ranks / 8)):
        assert limits == [last_cap, cap]
        return
    assert sum(limits) == total
    assert max(limits) <= math.ceil(cap)
    assert 1 <= limits[0] <= max(1, last_cap)
    full = math.ceil(min(cap, max(total / 8, 256 * KB * math.sqrt(max(1, ranks / 8)))))
    assert max(limits) <= full
    if total >= 4 * full:
        assert max(limits[0], limits[-1]) <= full / 4 + 1
    # From both ends a bucket is at most two times as large as its neighbour; one may hold the rest, and be small.
    places = [place for place, limit in enumerate(limits) if limit == full] or [0]
    for before, after in pairwise(limits[1 : places[0]]):
        assert after <= 2 * before + 1


@pytest.mark.parametrize(
    ("total", "cap", "ranks"),
    [
        (MB // 4 - 1, 25 * MB, 2),
        (100 * MB, MB // 4 - 1, 2),
        (100 * MB, math.inf, 2),
        (100 * MB, 25 * MB, 0),
        (0, MB, 2),
    ],
)
def test_where_cutting_would_not_pay_the_two_caps_hold(total, cap, ranks):
    assert ramp_limits(total, cap, 5, ranks) == [5, cap]


def test_the_smallest_model_that_is_cut_grows_with_the_root_of_the_ranks():
    def least(ranks):
        return min(kb for kb in range(1, 40_000) if len(ramp_limits(kb * KB, 25 * MB, MB, ranks)) > 2)

    assert [least(ranks) for ranks in (1, 8, 32, 8192)] == [256, 256, 512, 8192]


def specs_of(name):
    return [ParamSpec(param, shape, "float32") for param, shape in load(name)]


@pytest.mark.parametrize("name", SIZE_LISTS)
def test_a_rebuilt_plan_has_these_buckets(name):
    specs = specs_of(name)
    order = list(range(len(specs)))[::-1]
    plan = plan_buckets(specs, rule=BucketRule(ramp_ranks=2))
    rebuilt = rebuild_plan(plan, order)
    total = sum(spec.nbytes for spec in specs)
    limits = ramp_limits(total, 25 * MB, MB, 2)
    # Ten lines: from the end of the order, a bucket is closed by the gradient with which it reaches its limit.
    expected, members = [], []
    for index in range(len(specs)):
        members.append(index)
        if sum(specs[member].nbytes for member in members) >= limits[len(expected)]:
            expected.append(tuple(members))
            members = []
    expected += [tuple(members)] if members else []
    assert [bucket.params for bucket in rebuilt.buckets] == expected[::-1]
    assert len(rebuilt.buckets) > len(plan.buckets) or total > 1000 * MB


def test_the_first_plan_and_a_plan_without_ranks_are_paddles():
    specs = specs_of("resnet50")
    paddle, ours = plan_buckets(specs), plan_buckets(specs, rule=BucketRule(ramp_ranks=2))
    assert ours == paddle
    order = list(range(len(specs)))[::-1]
    assert rebuild_plan(replace(ours, rule=BucketRule()), order) == paddle
    assert rebuild_plan(ours, order) != paddle


def test_caps_for_each_bucket_are_kept():
    specs = specs_of("resnet50")
    caps = (MB, 5 * MB)
    plain, ramp = (plan_buckets(specs, rule=BucketRule(caps, ramp_ranks=ranks)) for ranks in (0, 2))
    order = list(range(len(specs)))[::-1]
    assert rebuild_plan(ramp, order) == rebuild_plan(plain, order)


def test_dtypes_are_cut_apart_and_sparse_gradients_are_alone():
    specs = [ParamSpec(str(n), (16 * KB,), "float64" if n % 3 else "float32", sparse=n in (30, 31)) for n in range(60)]
    rebuilt = rebuild_plan(plan_buckets(specs, rule=BucketRule(ramp_ranks=2)), list(range(59)))
    assert sorted(index for bucket in rebuilt.buckets for index in bucket.params) == list(range(60))
    assert [bucket.params for bucket in rebuilt.buckets if bucket.sparse] == [(30,), (31,)]
    assert all(len({specs[index].dtype for index in bucket.params}) == 1 for bucket in rebuilt.buckets)
    assert rebuilt.buckets[-1].params == (59,)  # it never became ready


def test_the_table_names_the_ramp():
    plan = rebuild_plan(plan_buckets(specs_of("tiny_2000"), rule=BucketRule(ramp_ranks=2)), range(2000))
    lines = plan.explain().splitlines()
    assert lines[1].split()[:2] == ["0", "0.2422"]
    assert "ramp 0.9766 MB" in plan.explain()
