"""Chooses buckets from measurements: record backwards, measure all-reduces, plan, and compare.

Read `timeline` first (when gradients are ready) and `cost` (how long an all-reduce takes; `measure` times it,
`nccl_model` estimates it). `simulation` says what a plan does with both. `planner` finds the best plan,
`published_plans` has the plans of others, and `simulated_comparison` compares them. `tuning` with `recorder` does all
this for a model that trains. `plot` and `trace` write a schedule to a file. `scaling` predicts steps at other numbers
of ranks, on a `cluster` of the connections in `connection_table`.
"""

from dpfuse.model.plan_from_groups import plan_from_groups
from dpfuse.tune.cluster import ALGORITHMS, Cluster
from dpfuse.tune.connection_table import INSIDE, NETWORKS, Connection
from dpfuse.tune.cost import CostTable
from dpfuse.tune.measure import measure_all_reduce
from dpfuse.tune.nccl_model import ETHERNET, INFINIBAND, NVLINK, Link
from dpfuse.tune.planner import lower_bound, optimal_plan
from dpfuse.tune.plot import save_plot
from dpfuse.tune.published_plans import (
    best_cap_plan,
    capped_plan,
    ddp_plan,
    mg_wfbp_plan,
    one_bucket_plan,
    paddle_plan,
    ramp_plan,
    rival_plans,
    single_plan,
)
from dpfuse.tune.scaling import ScaledStep, break_even, scale, scale_text
from dpfuse.tune.simulated_comparison import RANKS, Comparison, compare_plans, compare_ranks
from dpfuse.tune.simulation import BucketTimes, Schedule, simulate
from dpfuse.tune.timeline import Timeline
from dpfuse.tune.trace import save_trace
from dpfuse.tune.tuning import RecordedTimes, Tuning, autotune

__all__ = [
    "ALGORITHMS",
    "ETHERNET",
    "INFINIBAND",
    "INSIDE",
    "NETWORKS",
    "NVLINK",
    "RANKS",
    "BucketTimes",
    "Cluster",
    "Comparison",
    "Connection",
    "CostTable",
    "Link",
    "RecordedTimes",
    "ScaledStep",
    "Schedule",
    "Timeline",
    "Tuning",
    "autotune",
    "best_cap_plan",
    "break_even",
    "capped_plan",
    "compare_plans",
    "compare_ranks",
    "ddp_plan",
    "lower_bound",
    "measure_all_reduce",
    "mg_wfbp_plan",
    "one_bucket_plan",
    "optimal_plan",
    "paddle_plan",
    "plan_from_groups",
    "ramp_plan",
    "rival_plans",
    "save_plot",
    "save_trace",
    "scale",
    "scale_text",
    "simulate",
    "single_plan",
]
