"""The buckets of a training in its checkpoint. With three ranks or more, or narrow wires, bits depend on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dpfuse.comm import votes
from dpfuse.engine.backward_table import IDLE
from dpfuse.engine.plan import BucketPlan
from dpfuse.engine.sync import GradSync
from dpfuse.model.plan_from_groups import plan_from_groups
from dpfuse.wrapper import SyncedModule

__all__ = ["saved_plan", "use_saved_plan"]


def saved_plan(model: SyncedModule) -> dict[str, Any] | None:
    """Return the buckets that a resumed training is to begin with; None where it makes the same ones by itself."""
    grads = _planned_again(model)
    if grads is None or not (grads.reducer.rebuilt or grads.plan.tuned):
        return None
    return {"made_for": _made_for(grads.plan), "buckets": [list(bucket.params) for bucket in grads.plan.buckets]}


def use_saved_plan(model: SyncedModule | None, saved: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Use these buckets from the first backward on. Call it on every rank, of as many as have saved them.

    Where a rank cannot use them, since its model or its options differ or a backward has planned its buckets already,
    all ranks keep their own.

    Args:
        model: before its first backward; None on a rank that has no such model.
        saved: what `saved_plan` has returned.
        group: of the model.

    Raises:
        DPFuseError: a rank has no memory for them; on every rank.
    """
    grads = None if model is None else _planned_again(model)
    usable = (
        grads is not None
        and grads.group is group
        and not (grads.reducer.rebuilt or grads.reducer.change)
        and grads.reducer.state is IDLE
        and saved["made_for"] == _made_for(grads.plan)
    )
    if votes.agree_on_text("", group, "the buckets of a checkpoint", ready=usable).ready:
        assert grads is not None
        plan = plan_from_groups(grads.plan.specs, saved["buckets"])
        grads.use_plan(replace(grads.plan, buckets=plan.buckets, tuned=True))


def _planned_again(model: SyncedModule) -> GradSync | None:
    """The engine of a model whose buckets are planned again after its first backward."""
    if model._sync is None:
        return None
    options, grads = model._options, model._sync.grads
    is_tuned = options.autotune or model.tuning is not None or not options.follows_rule
    return None if is_tuned or not grads.plans_again else grads


def _made_for(plan: BucketPlan) -> str:
    params = [(spec.name, tuple(spec.shape), spec.dtype, spec.sparse) for spec in plan.specs]
    kinds = sorted({torch.device(spec.device).type for spec in plan.specs})
    return repr((params, kinds, plan.comm_buffer_size, plan.last_comm_buffer_size, plan.rule))
