"""Compares the optimal plan with the published plans on one timeline, for one cost or for many ranks. Plain tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dpfuse.tune.cost import CostTable
from dpfuse.tune.nccl_model import Link
from dpfuse.tune.planner import lower_bound, optimal_plan
from dpfuse.tune.published_plans import rival_plans
from dpfuse.tune.simulation import simulate, table_text
from dpfuse.tune.timeline import Timeline

__all__ = ["RANKS", "Comparison", "compare_plans", "compare_ranks"]

RANKS = tuple(8 << power for power in range(12))  # 8 to 16,384


@dataclass(frozen=True)
class Comparison:
    """Results by name of the plan, the optimal plan first."""

    buckets: dict[str, int]  # number of buckets
    exposed: dict[str, float]  # seconds that communication adds to backward
    backward_end: float
    lower_bound: float  # seconds of exposed communication that no plan can avoid

    def explain(self) -> str:
        """Return a table with times in ms. `over best` compares the whole time with that of the optimal plan."""
        best = self.backward_end + next(iter(self.exposed.values()))
        rows = [("plan", "buckets", "exposed", "over best")]
        rows += [
            (name, str(self.buckets[name]), f"{exposed * 1e3:.3f}", _percent((self.backward_end + exposed) / best - 1))
            for name, exposed in self.exposed.items()
        ]
        return f"{table_text(rows)}\nno plan exposes less than {self.lower_bound * 1e3:.3f} ms"


def _percent(part: float) -> str:
    return f"{round(part, 4) + 0.0:+.1%}"  # no "-0.0%"


def compare_plans(timeline: Timeline, cost: CostTable) -> Comparison:
    """Compare the optimal plan with all published plans on one timeline.

    Example:
        >>> import dpfuse
        >>> from dpfuse.tune import CostTable, Timeline, compare_plans
        >>> specs = [dpfuse.ParamSpec(f"layer{index}", (2_000_000,), "float32") for index in range(10)]
        >>> print(compare_plans(Timeline.synthetic(specs, 0.010), CostTable.affine(5e-4, 8e9)).explain())
        plan                     buckets  exposed  over best
        optimal                  4        4.000    +0.0%
        DDP, 1 + 25 MiB          4        5.500    +10.7%
        Paddle, 25 MiB + last 1  4        5.500    +10.7%
        best single size         5        4.500    +3.6%
        MG-WFBP                  5        4.000    +0.0%
        one bucket               1        10.500   +46.4%
        each gradient alone      10       6.000    +14.3%
        no plan exposes less than 1.500 ms
    """
    plans = {"optimal": optimal_plan(timeline, cost)} | rival_plans(timeline, cost)
    return Comparison(
        {name: len(plan.buckets) for name, plan in plans.items()},
        {name: simulate(timeline, plan, cost).exposed for name, plan in plans.items()},
        timeline.backward_end,
        lower_bound(timeline, cost) - timeline.backward_end,
    )


def compare_ranks(timeline: Timeline, link: Link, ranks: Iterable[int] = RANKS) -> dict[int, Comparison]:
    """Compare plans for several numbers of ranks on one kind of network.

    Args:
        timeline: of one rank. It is used for every number of ranks.
        link: the connection between the ranks.
        ranks: 8 to 16,384 by default.

    Example:
        >>> import dpfuse
        >>> from dpfuse.tune import INFINIBAND, Timeline, compare_ranks
        >>> timeline = Timeline.synthetic([dpfuse.ParamSpec("a", (10**7,), "float32")], 0.010)
        >>> sorted(compare_ranks(timeline, INFINIBAND, [8, 1024]))
        [8, 1024]
    """
    return {count: compare_plans(timeline, link.cost(count)) for count in ranks}
