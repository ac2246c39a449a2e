"""Chooses buckets from measurements: record backwards, measure all-reduces, plan, and compare.

Read `timeline` first (when gradients are ready) and `cost` (how long an all-reduce takes; `measure` times it).
`simulation` says what a plan does with both, and `planner` finds the best plan. `tuning` with `recorder` does all this
for a model that trains. `plot` and `trace` write a schedule to a file.
"""

from dpfuse.model.plan_from_groups import plan_from_groups
from dpfuse.tune.cost import CostTable
from dpfuse.tune.measure import measure_all_reduce
from dpfuse.tune.planner import optimal_plan
from dpfuse.tune.plot import save_plot
from dpfuse.tune.simulation import BucketTimes, Schedule, simulate
from dpfuse.tune.timeline import Timeline
from dpfuse.tune.trace import save_trace
from dpfuse.tune.tuning import RecordedTimes, Tuning, autotune

__all__ = [
    "BucketTimes",
    "CostTable",
    "RecordedTimes",
    "Schedule",
    "Timeline",
    "Tuning",
    "autotune",
    "measure_all_reduce",
    "optimal_plan",
    "plan_from_groups",
    "save_plot",
    "save_trace",
    "simulate",
]
