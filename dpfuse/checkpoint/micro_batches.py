"""Fixed micro-batches in a checkpoint: with them a training goes on with the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpfuse.engine.user_line import warn_at_user
from dpfuse.model.machine_kind import machine_kind
from dpfuse.model.micro_loop import MicroLoop
from dpfuse.wrapper import SyncedModule

__all__ = ["check_micro_batches", "saved_micro_batches", "use_micro_batches"]


def saved_micro_batches(model: SyncedModule) -> dict[str, Any] | None:
    """Return what a resumed training needs to have the same bits; None of a model without fixed micro-batches."""
    loop = _loop_of(model)
    if loop is None:
        return None
    kind = machine_kind(next(model.parameters()).device)
    return {"count": loop.deal.count, "seed": loop.seed, "steps": loop.steps, "threads": loop.threads, "machine": kind}


def check_micro_batches(model: SyncedModule, saved: Mapping[str, Any] | None) -> bool:
    """Check that a training can go on as it was saved. Warn where the machine is of another kind.

    Returns:
        Whether both have fixed micro-batches, so that random states are the same on all ranks.

    Raises:
        ValueError: it has another number of micro-batches or of threads.
    """
    loop = _loop_of(model)
    if loop is None or saved is None:
        return False
    if loop.deal.count != saved["count"]:
        raise ValueError(
            f"the checkpoint is of a training with fixed_micro_batches={saved['count']}, and the model was wrapped "
            f"with {loop.deal.count}, expected the same: other sums have other bits. Pass the same number."
        )
    if loop.threads != saved["threads"]:
        raise ValueError(
            f"the checkpoint is of a training in which torch computed with {saved['threads']} threads, and now it has "
            f"{loop.threads}, expected the same: sums in several threads have other bits. Set "
            f"DPFUSE_THREADS={saved['threads']}."
        )
    now = machine_kind(next(model.parameters()).device)
    before: dict[str, str] = saved["machine"]
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if differing:
        name = differing[0]
        warn_at_user(
            f"the checkpoint is from a machine of another kind, so the bits of this training may differ from those of "
            f"an undisturbed one: {', '.join(differing)} ({name}: {before.get(name)}, here {now.get(name)}). Go on on "
            "machines of one kind where bits matter."
        )
    return True


def use_micro_batches(model: SyncedModule, saved: Mapping[str, Any]) -> None:
    """Go on with the seeds of a saved training, at the step that comes next."""
    loop = _loop_of(model)
    assert loop is not None
    loop.seed, loop.steps = saved["seed"], saved["steps"]


def _loop_of(model: SyncedModule) -> MicroLoop | None:
    return None if model._sync is None else model._sync.micro_loop
