"""Chooses buckets from measurements: record backwards, measure all-reduces, plan, and compare.

Read `timeline` first (when gradients are ready) and `cost` (how long an all-reduce takes; `measure` times it).
`planner` finds the best plan for both. `tuning` with `recorder` does all this for a model that trains.
"""

from dpfuse.model.plan_from_groups import plan_from_groups
from dpfuse.tune.cost import CostTable
from dpfuse.tune.measure import measure_all_reduce
from dpfuse.tune.planner import optimal_plan
from dpfuse.tune.timeline import Timeline
from dpfuse.tune.tuning import RecordedTimes, Tuning, autotune

__all__ = [
    "CostTable",
    "RecordedTimes",
    "Timeline",
    "Tuning",
    "autotune",
    "measure_all_reduce",
    "optimal_plan",
    "plan_from_groups",
]
