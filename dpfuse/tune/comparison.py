"""The exact plan beside the published ones, on one timeline, for one link or for many ranks. Plain tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dpfuse.tune.cost import CostTable
from dpfuse.tune.link import Link
from dpfuse.tune.planner import lower_bound, optimal_plan
from dpfuse.tune.rivals import rival_plans
from dpfuse.tune.simulation import simulate, table_text
from dpfuse.tune.timeline import Timeline

__all__ = ["RANKS", "Comparison", "compare_plans", "compare_ranks"]

RANKS = tuple(8 << power for power in range(12))  # 8 to 16,384


@dataclass(frozen=True)
class Comparison:
    """Plans by name, the exact one first."""

    buckets: dict[str, int]  # how many
    exposed: dict[str, float]  # seconds that communication adds to backward
    backward_end: float
    lower_bound: float  # seconds of exposure that no plan avoids

    def explain(self) -> str:
        """A table; times in ms. `over best` compares backward and communication together with the exact plan's."""
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
    """The exact plan and all rivals on one timeline.

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
    """`compare_plans` for several numbers of ranks on one kind of network.

    Args:
        timeline: of one rank; its backward takes as long however many ranks there are.
        link: what connects them.
        ranks: 8 to 16,384 by default.

    Example:
        >>> import dpfuse
        >>> from dpfuse.tune import INFINIBAND, Timeline, compare_ranks
        >>> timeline = Timeline.synthetic([dpfuse.ParamSpec("a", (10**7,), "float32")], 0.010)
        >>> sorted(compare_ranks(timeline, INFINIBAND, [8, 1024]))
        [8, 1024]
    """
    return {count: compare_plans(timeline, link.cost(count)) for count in ranks}
