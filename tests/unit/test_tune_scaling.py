"""Predicted steps at many ranks: the cost of each all-reduce by hand, exposed times by a plain loop, the break-even."""

from __future__ import annotations

import math

import pytest

import dpfuse
from dpfuse.tune import (
    ALGORITHMS,
    INSIDE,
    NETWORKS,
    Cluster,
    Connection,
    ScaledStep,
    Timeline,
    break_even,
    ddp_plan,
    ramp_plan,
    scale,
    scale_text,
)
from dpfuse.tune.scaling import on_gpu

FAST = Connection("fast", 100e9, 1e-6, "by hand")
SLOW = Connection("slow", 10e9, 20e-6, "by hand", cards=2)
CLUSTER = Cluster(FAST, SLOW, ranks_per_node=4)  # two cards: 20 GB/s between nodes
SIZE = 1e8


def test_a_ring_inside_a_node():
    # 2(n-1) hops of 1 µs, and 2(n-1)/n of the bytes at 100 GB/s
    assert CLUSTER.cost(4, "ring")(0) == pytest.approx(6e-6)
    assert CLUSTER.cost(4, "ring")(SIZE) == pytest.approx(6e-6 + 1.5 * SIZE / 100e9)


@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_a_ring_of_one_rank_per_node_is_the_textbooks(ranks):
    alone = Cluster(FAST, SLOW, ranks_per_node=1, cards=1)
    expected = 2 * (ranks - 1) / ranks * SIZE / 10e9 + 2 * (ranks - 1) * 20e-6
    assert alone.cost(ranks, "ring")(SIZE) == pytest.approx(expected)


def test_a_ring_over_three_nodes():
    # 22 hops, 4 of them between nodes; the cards are the slowest part
    expected = 18 * 1e-6 + 4 * 20e-6 + 2 * 11 / 12 * SIZE / 20e9
    assert CLUSTER.cost(12, "ring")(SIZE) == pytest.approx(expected)


def test_a_tree_over_five_nodes():
    # chains of 3 hops, and 3 levels, both up and down; twice the bytes
    expected = 2 * (3 * 1e-6 + 3 * 20e-6) + 2 * SIZE / 20e9
    assert CLUSTER.cost(20, "tree")(SIZE) == pytest.approx(expected)


def test_two_levels_over_four_nodes():
    inside = 2 * 3 * 1e-6 + 2 * 3 / 4 * SIZE / 100e9
    between = 2 * 2 * 20e-6 + 2 * 3 / 4 * (SIZE / 4) / (
        20e9 / 4
    )  # each rank sends a quarter with a quarter of the cards
    assert CLUSTER.cost(16, "two-level")(SIZE) == pytest.approx(inside + between)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_sends_nothing_and_more_ranks_never_take_less_time(algorithm):
    assert CLUSTER.cost(1, algorithm)(SIZE) == 0
    times = [CLUSTER.cost(ranks, algorithm)(SIZE) for ranks in (1, 2, 4, 8, 16, 1024, 16384)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: CLUSTER.cost(0, "ring"), "expected 1 rank or more, got 0"),
        (lambda: CLUSTER.cost(6, "ring"), "6 ranks do not fill nodes of 4; expected a multiple"),
        (lambda: CLUSTER.cost(4, "star"), "algorithm must be one of ring, tree, two-level, got 'star'"),
        (lambda: Cluster(FAST, SLOW, ranks_per_node=0), "ranks_per_node must be at least 1, got 0"),
        (lambda: Cluster(FAST, SLOW, cards=0), "cards must be at least 1, got 0"),
        (lambda: scale(TIMELINE, CLUSTER, [4], compute=0), "a step must take more than 0 s"),
        (lambda: scale(TIMELINE, CLUSTER, [4], compute=math.nan), "a step must take more than 0 s"),
    ],
)
def test_what_is_not_possible_is_an_error(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_every_connection_has_a_source_and_its_own_name():
    for table in (INSIDE, NETWORKS):
        for name, connection in table.items():
            assert connection.name == name
            assert connection.source
            assert 1e9 <= connection.bandwidth < 1e12
            assert 1e-6 < connection.latency < 1e-3
    assert INSIDE["nvlink-4"].bandwidth == pytest.approx(18 * 20.6e9)
    assert NETWORKS["infiniband-ndr"].bandwidth == pytest.approx(48e9)


SPECS = [dpfuse.ParamSpec(str(index), (1_000_000 + 37_000 * index,), "float32") for index in range(24)]
TIMELINE = Timeline.synthetic(SPECS, 0.010)


def exposed_by_a_loop(timeline, plan, cost):
    free = 0.0
    for order, bucket in enumerate(plan.buckets):
        ready = max(timeline.ready[index] for index in bucket.params)
        if order == len(plan.buckets) - 1:
            ready = timeline.backward_end
        free = max(free, ready) + cost(4.0 * sum(math.prod(timeline.specs[index].shape) for index in bucket.params))
    return free - timeline.backward_end


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_exposed_times_are_those_of_a_plain_loop(algorithm):
    scaled = on_gpu(TIMELINE, 0.020)
    for step in scale(TIMELINE, CLUSTER, [4, 64, 1024], algorithm=algorithm, compute=0.030):
        cost = CLUSTER.cost(step.ranks, algorithm)
        for name, plan in (("DDP", ddp_plan(scaled)), ("dpfuse", ramp_plan(scaled, ranks=step.ranks))):
            assert step.exposed[name] == pytest.approx(exposed_by_a_loop(scaled, plan, cost))
            assert step.buckets[name] == len(plan.buckets)
        assert step.exposed["best"] <= min(step.exposed["DDP"], step.exposed["dpfuse"]) + 1e-12
        assert step.seconds("DDP") == pytest.approx(0.030 + step.exposed["DDP"])
        assert step.efficiency("best") == pytest.approx(0.030 / step.seconds("best"))


def test_without_a_step_backward_keeps_its_time():
    (step,) = scale(TIMELINE, CLUSTER, [1])
    assert step.compute == pytest.approx(0.015)
    assert set(step.exposed.values()) == {0.0}


def test_the_limits_bind_the_best_plan():
    small, large = (scale(TIMELINE, CLUSTER, [64], comm_buffer_size=size)[0] for size in (4, math.inf))
    assert small.buckets["best"] > 20 > large.buckets["best"]
    assert small.buckets["DDP"] == large.buckets["DDP"]


def test_a_scaled_backward_keeps_its_wire_and_its_order():
    timeline = Timeline(SPECS[:2], [0.3, 0.1], 0.3, "bfloat16")
    scaled = on_gpu(timeline, 0.7)
    assert (scaled.wire_dtype, scaled.order, scaled.ready[0]) == ("bfloat16", (1, 0), 0.7)
    assert {spec.device for spec in scaled.specs} == {"cuda:0"}


def step_of(ranks, best, dpfuse, ddp):
    return ScaledStep(
        ranks, "ring", 1.0, {"best": best, "dpfuse": dpfuse, "DDP": ddp}, dict.fromkeys(["best", "dpfuse", "DDP"], 1)
    )


def test_the_break_even_is_the_first_number_of_ranks_that_saves_one_percent():
    steps = [step_of(8, 0.0, 0.0, 0.005), step_of(16, 0.0, 0.02, 0.02), step_of(32, 0.0, 0.2, 0.1)]
    assert [step.saved("best") for step in steps] == pytest.approx([1 - 1 / 1.005, 1 - 1 / 1.02, 1 - 1 / 1.1])
    assert (break_even(steps, "best"), break_even(steps, "dpfuse")) == (16, None)
    *_, best, dpfuse = scale_text(steps).splitlines()
    assert best == "the best plan first saves 1 % of DDP's step at 16 ranks"
    assert dpfuse == (
        "dpfuse's default saves 1 % of DDP's step at no number of ranks: there is no break-even; it first takes 1 % "
        "longer than DDP's at 32 ranks"
    )


def test_the_table_has_a_row_per_number_of_ranks():
    header, row, *_ = scale_text([step_of(8, 0.0, 0.01, 0.25)]).splitlines()
    assert header.split()[:3] == ["ranks", "best", "plan"]
    assert row.split() == [
        "8", "1000.000", "0.000", "100.0%", "1", "1010.000", "10.000", "1", "1250.000", "250.000", "1",
        "+20.00%", "+19.20%",
    ]  # fmt: skip
