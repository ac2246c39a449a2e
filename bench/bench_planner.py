"""The exact planner: compared with all plans of small models and with published rules on larger models, and timed.

Cases on the CPU: "brute force" has the planner's CPU time per model. A timeline has, for each rule, the end of its plan
on several networks (simulated, not measured). "N gradients" is the CPU time to plan them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from time import thread_time
from typing import Any

import numpy as np
import pytest

import dpfuse
from bench.nccl_model import ETHERNET, INFINIBAND, NVLINK
from bench.playback import play_back, played_back, remembered
from bench.published_plans import rival_plans
from bench.record_timeline import load as load_recorded
from bench.simulation import simulate
from bench.size_list import SIZE_LISTS, load
from dpfuse.engine.plan import BucketPlan
from dpfuse.tune import CostTable, Timeline, optimal_plan

EXACT = "exact planner"
RIVALS = (
    "DDP, 1 + 25 MiB",
    "Paddle, 25 MiB + last 1",
    "best single size",
    "MG-WFBP",
    "one bucket",
    "each gradient alone",
)
EQUAL = 1e-11  # relative; sums of the same numbers in another order
BACKWARD = 0.05  # seconds of the synthetic backwards
RECORDED = "recorded ResNet-50"
RANDOM = "random timelines"
LARGE = {"1000 gradients": 1000, "10000 gradients": 10_000}

Problem = tuple[Timeline, CostTable]


def _random_problem(rng: np.random.Generator, count: int, kinds: int) -> Problem:
    dtypes = ["float32", "bfloat16"]
    specs = [
        dpfuse.ParamSpec(f"p{index}", (int(size),), dtypes[rng.integers(kinds)])
        for index, size in enumerate(rng.choice([1, 1000, 20_000, 500_000], count) * rng.random(count))
    ]
    end = 10 ** rng.uniform(-4, -2)
    return Timeline(specs, (rng.random(count) * end).tolist(), end), _random_cost(rng)


def _random_cost(rng: np.random.Generator) -> CostTable:
    if rng.random() < 0.5:
        return CostTable.affine(10 ** rng.uniform(-6, -3), 10 ** rng.uniform(8, 10))
    # Slower and faster in turns, like a real group that changes its algorithm with the size.
    sizes, seconds = np.cumsum(10 ** rng.uniform(1, 6, 6)), np.sort(10 ** rng.uniform(-6, -3, 6))
    return CostTable.measured(sizes.tolist(), seconds.tolist())


def _cuts(members: list[int]) -> Iterator[list[list[int]]]:
    """Yield every way to cut a list into runs."""
    for cuts in product([False, True], repeat=len(members) - 1):
        runs = [members[:1]]
        for member, cut in zip(members[1:], cuts, strict=True):
            if cut:
                runs.append([])
            runs[-1].append(member)
        yield runs


def _earliest_end(timeline: Timeline, cost: CostTable) -> float:
    """Return the earliest end of all plans, by trying each of them."""
    kinds: dict[str, list[int]] = {}
    for index in timeline.order:
        kinds.setdefault(timeline.specs[index].dtype, []).append(index)
    places = {index: place for place, index in enumerate(timeline.order)}
    best = math.inf
    for parts in product(*(list(_cuts(members)) for members in kinds.values())):
        runs = sorted((run for part in parts for run in part), key=lambda run: places[run[-1]])
        free = 0.0
        for run in runs:
            ready = timeline.backward_end if run is runs[-1] else timeline.ready[run[-1]]
            free = max(free, ready) + _cost_of(cost, sum(timeline.nbytes[index] for index in run))
        best = min(best, free)
    return best


@cache
def _cost_of(cost: CostTable, nbytes: int) -> float:
    return cost(float(nbytes))


def _brute_force(quick: bool) -> dict[str, Any]:
    rng, seconds, worst, differences = np.random.default_rng(0), [], 0.0, 0
    for number in range(50 if quick else 1000):
        timeline, cost = _random_problem(rng, int(rng.integers(1, 11)), 1 + number % 2)
        began = thread_time()
        plan = optimal_plan(timeline, cost)
        seconds.append(thread_time() - began)
        off = abs(simulate(timeline, plan, cost).end / _earliest_end(timeline, cost) - 1)
        differences += off > EQUAL
        worst = max(worst, off)
        _cost_of.cache_clear()
    return {EXACT: {"seconds": seconds, "cases": len(seconds), "differences": differences, "worst": worst}}


def _problems(case: str, quick: bool) -> list[Problem]:
    """Return the timeline of a case on each of its networks."""
    if case == RANDOM:
        rng = np.random.default_rng(1)
        return [_random_problem(rng, int(rng.integers(11, 300)), 1) for _ in range(10 if quick else 200)]
    networks = [NVLINK.cost(8), INFINIBAND.cost(64), INFINIBAND.cost(1024), ETHERNET.cost(16), ETHERNET.cost(128)]
    if case == RECORDED:
        timeline, measured = load_recorded("resnet50")
        networks.append(measured)
    else:
        specs = [dpfuse.ParamSpec(name, shape, "float32") for name, shape in load(case)]
        timeline = Timeline.synthetic(specs, BACKWARD)
    # The presets are for today's GPUs. On such a network the same bytes take this many backwards.
    load_of = sum(timeline.nbytes) / timeline.backward_end
    networks += [CostTable.affine(latency, load_of / part) for latency in (2e-5, 2e-3) for part in (0.5, 1, 2)]
    return [(timeline, cost) for cost in networks]


def _beside_rivals(case: str, quick: bool) -> dict[str, Any]:
    ends: dict[str, list[float]] = {name: [] for name in (EXACT, *RIVALS)}
    for timeline, cost in _problems(case, quick):
        plans: Mapping[str, BucketPlan] = {EXACT: optimal_plan(timeline, cost), **rival_plans(timeline, cost)}
        for name, plan in plans.items():
            ends[name].append(simulate(timeline, plan, cost).end)
    best = np.array(ends[EXACT])
    return {
        name: {
            "seconds": times,
            "networks": len(times),
            "earlier": int((np.array(times) < best * (1 - EQUAL)).sum()),
            "worst": float((np.array(times) / best).max()),
        }
        for name, times in ends.items()
    }


def _large(count: int, quick: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    specs = [
        dpfuse.ParamSpec(str(index), (int(size),), "float32") for index, size in enumerate(rng.lognormal(10, 2, count))
    ]
    timeline, cost = Timeline.synthetic(specs, BACKWARD), INFINIBAND.cost(64)
    seconds = []
    for _ in range(1 if quick or count > 1000 else 21):
        began = thread_time()
        optimal_plan(timeline, cost)
        seconds.append(thread_time() - began)
    return {EXACT: {"seconds": seconds, "gradients": count}}


@remembered
def _measured(case: str, quick: bool) -> dict[str, Any]:
    if case == "brute force":
        return _brute_force(quick)
    if case in LARGE:
        return _large(LARGE[case], quick)
    return _beside_rivals(case, quick)


CASES = {
    "brute force": (EXACT,),
    **dict.fromkeys((RECORDED, *SIZE_LISTS, RANDOM), (EXACT, *RIVALS)),
    **dict.fromkeys(LARGE, (EXACT,)),
}


@pytest.mark.parametrize(("case", "variant"), [(case, variant) for case in CASES for variant in CASES[case]])
@played_back
def test_planner(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    result = dict(_measured(case, request.config.getoption("--quick"))[variant])
    seconds = result.pop("seconds")
    play_back(benchmark, seconds, {"suite": "planner", "case": case, "variant": variant, **result})
