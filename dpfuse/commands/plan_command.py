"""`dpfuse plan`: the buckets of a model, and those of torch's DDP. Starts no ranks and runs no backward."""

from __future__ import annotations

from dpfuse.commands.user_model import build
from dpfuse.engine.plan import MB, BucketPlan, BucketRule, plan_buckets

__all__ = ["show_plan"]

DDP_CAPS = (1, 25)  # MB: DDP's first bucket, and all others


def show_plan(place: str, comm_buffer_size: float, last_comm_buffer_size: float) -> int:
    """Print both plans of the model at `place`; sizes are in MB."""
    module = build(place)
    plan = plan_buckets(module, comm_buffer_size, last_comm_buffer_size)
    ddp = plan_buckets(module, max(DDP_CAPS), max(DDP_CAPS), rule=BucketRule(tuple(cap * MB for cap in DDP_CAPS)))
    print(
        f"{place}: {len(plan.specs)} trainable parameters, {plan.nbytes / MB:.4g} MB of gradients\n\n"
        f"{_shown(f'dpfuse, {comm_buffer_size:g} MB, the last {last_comm_buffer_size:g} MB', plan)}\n\n"
        f"{_shown('torch DDP, 25 MB, the first 1 MB', ddp)}\n\n"
        "Both assume that gradients come in the reverse of the order in which parameters were made. After the first\n"
        "backward each is made again for the real order."
    )
    return 0


def _shown(title: str, plan: BucketPlan) -> str:
    count = len(plan.buckets)
    return f"{title}: {count} bucket{'s' if count != 1 else ''}\n{plan.explain()}"
