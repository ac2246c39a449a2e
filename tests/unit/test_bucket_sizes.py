"""The ramp: small buckets at both ends of the order, within the caps; and the first plan knows nothing of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest

from bench.size_list import SIZE_LISTS, load
from dpfuse.engine.bucket_sizes import ON_CPU, ON_GPU, ON_SHARED_CORES, ramp_limits
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import MB, BucketRule, plan_buckets, rebuild_plan

KB = 1 << 10


@pytest.mark.parametrize("ranks", [1, 2, 1024, 16384])
@pytest.mark.parametrize("last_cap", [0, 100 * KB, MB, 25 * MB, math.inf])
def test_limits_rise_and_fall_within_the_caps(last_cap, ranks):
    least = MB / 2 * math.sqrt(max(1, ranks / 1024))
    for total, cap in product([MB, 7 * MB + 12, 100 * MB, 1340 * MB], [MB, 3.5 * MB, 25 * MB, 1000 * MB]):
        limits = ramp_limits(total, cap, last_cap, ranks)
        if total < least:
            assert limits == [last_cap, cap]
            continue
        assert sum(limits) == total, (total, cap)
        full = math.ceil(min(cap, max(total / 5, least)))
        assert max(limits) <= full, (total, cap)
        assert 1 <= limits[0] <= max(1, last_cap), (total, cap)
        if total >= 5 * full:
            assert max(limits[0], limits[-1]) <= full / 3 + 1, (total, cap)
        # Behind the last one, a bucket is at most two times as large as the one that is sent after it.
        rising = limits[1 : limits.index(full)] if full in limits else []
        assert all(larger <= 2 * smaller + 1 for smaller, larger in pairwise(rising)), (total, cap)


@pytest.mark.parametrize(
    ("total", "cap", "ranks"),
    [(5, 25 * MB, 2), (100 * MB, MB // 2 - 1, 2), (100 * MB, math.inf, 2), (100 * MB, 25 * MB, 0), (0, MB, 2)],
)
def test_where_cutting_would_not_pay_the_two_caps_hold(total, cap, ranks):
    assert ramp_limits(total, cap, 5, ranks) == [5, cap]


@pytest.mark.parametrize(
    ("total", "last_cap", "last"),
    [(4 * MB - 4, MB, MB - 1), (2 * MB, MB, MB // 2), (MB + 4, MB, MB // 4 + 1), (MB, MB, MB), (2 * MB, 7, 7)],
)
def test_a_model_below_the_least_has_a_quarter_or_less_in_its_last_bucket(total, last_cap, last):
    assert ramp_limits(total, 25 * MB, last_cap, 2, ON_CPU) == [last, 25 * MB]


@pytest.mark.parametrize(
    ("total", "cap", "last"), [(MB, 25 * MB, MB), (2 * MB, 25 * MB, MB // 2), (100 * MB, 25 * MB, MB), (9, 2, 3)]
)
def test_on_shared_cores_no_model_is_cut_into_a_ramp(total, cap, last):
    last_cap = MB if total > 9 else 3
    assert ramp_limits(total, cap, last_cap, 2, ON_SHARED_CORES) == [last, cap]


def test_only_cpus_of_one_machine_share_their_cores():
    specs = specs_of("resnet50")
    order = list(range(len(specs)))[::-1]
    for device, same in (("cpu", False), ("cuda:0", True)):
        plan = plan_buckets([replace(spec, device=device) for spec in specs], rule=BucketRule(ramp_ranks=2))
        assert (rebuild_plan(plan, order, one_machine=True) == rebuild_plan(plan, order)) is same
    # The last bucket is that of the first plan, and the caps are kept. This order is that of the first plan, too.
    plan = plan_buckets(specs, rule=BucketRule(ramp_ranks=2))
    assert rebuild_plan(plan, order, one_machine=True).buckets == plan.buckets


def test_the_smallest_model_that_is_cut_grows_with_the_root_of_the_ranks():
    def least(ranks, ramp):
        return min(kb for kb in range(64, 40_000, 64) if len(ramp_limits(kb * KB, 25 * MB, MB, ranks, ramp)) > 2)

    assert [least(ranks, ON_GPU) for ranks in (1, 1024, 4096, 16384)] == [512, 512, 1024, 2048]
    assert least(2, ON_CPU) == 4096


def specs_of(name):
    return [ParamSpec(param, shape, "float32") for param, shape in load(name)]


@pytest.mark.parametrize("name", SIZE_LISTS)
def test_a_rebuilt_plan_has_these_buckets(name):
    specs = specs_of(name)
    order = list(range(len(specs)))[::-1]
    plan = plan_buckets(specs, rule=BucketRule(ramp_ranks=2))
    rebuilt = rebuild_plan(plan, order)
    total = sum(spec.nbytes for spec in specs)
    limits = ramp_limits(total, 25 * MB, MB, 2, ON_CPU)
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
    specs = [ParamSpec(str(n), (64 * KB,), "float64" if n % 3 else "float32", sparse=n in (30, 31)) for n in range(60)]
    rebuilt = rebuild_plan(plan_buckets(specs, rule=BucketRule(ramp_ranks=2)), list(range(59)))
    assert sorted(index for bucket in rebuilt.buckets for index in bucket.params) == list(range(60))
    assert [bucket.params for bucket in rebuilt.buckets if bucket.sparse] == [(30,), (31,)]
    assert all(len({specs[index].dtype for index in bucket.params}) == 1 for bucket in rebuilt.buckets)
    assert rebuilt.buckets[-1].params == (59,)  # it never became ready


def test_the_table_names_the_ramp_and_a_gpu_gets_smaller_buckets_than_a_cpu():
    specs = specs_of("tiny_2000")
    counts = []
    for device in ("cpu", "cuda:0"):
        placed = [replace(spec, device=device) for spec in specs]
        plan = rebuild_plan(plan_buckets(placed, rule=BucketRule(ramp_ranks=2)), range(2000))
        counts.append(len(plan.buckets))
        assert "ramp 1.042 MB" in plan.explain() or device == "cpu"
    assert "ramp 2 MB" in rebuild_plan(plan_buckets(specs, rule=BucketRule(ramp_ranks=2)), range(2000)).explain()
    assert counts == [5, 7]


@pytest.mark.parametrize("name", SIZE_LISTS)
def test_a_cap_that_no_program_has_passed_grows_by_a_tenth_of_the_model(name):
    specs = [replace(spec, device="cuda:0") for spec in specs_of(name)]
    order, total = list(range(len(specs)))[::-1], sum(spec.nbytes for spec in specs)
    first, capped = (plan_buckets(specs, rule=BucketRule(ramp_ranks=2, grows=grows)) for grows in (True, False))
    assert first == plan_buckets(specs), "the first plan is Paddle's"
    grown, kept = rebuild_plan(first, order).buckets, rebuild_plan(capped, order).buckets
    assert (grown == kept) is (total < 125 * MB), "a fifth of these is less than 25 MB"
    # What the worst moment of a backward needs more: the raw gradients of a bucket that is not packed yet.
    more = max(bucket.nbytes for bucket in grown) - max(bucket.nbytes for bucket in kept)
    assert more <= total / 10 + max(spec.nbytes for spec in specs if spec.nbytes <= total / 10)
    assert len(grown) <= 12


def test_no_cap_grows_on_shared_cores_or_by_the_greedy_rule():
    specs = specs_of("bert_large")
    order = list(range(len(specs)))[::-1]
    for ranks, one_machine, same in ((2, True, True), (0, False, True), (2, False, False)):
        plans = [plan_buckets(specs, rule=BucketRule(ramp_ranks=ranks, grows=grows)) for grows in (True, False)]
        grown, kept = (rebuild_plan(plan, order, one_machine=one_machine).buckets for plan in plans)
        assert (grown == kept) is same
