"""DPF-L08: ranks differ in the training flag of the model, or in the dtype of autocast."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["BACKWARDS", "MODES", "note"]

BACKWARDS = 2  # running
TRAIN = "call train() and eval() on all ranks, train() also after an evaluation on one of them"
AUTOCAST = "enter autocast with the same dtype"
# Each mode that is compared: what a rank does that is in it, and what to do.
MODES = {
    "training": ("in training mode", TRAIN),
    "float16": ("under autocast with float16", AUTOCAST),
    "bfloat16": ("under autocast with bfloat16", AUTOCAST),
}


def note(backwards: int, rank: int, size: int, modes: Mapping[str, tuple[int, bool]]) -> tuple[int, str | None]:
    """Return how many backwards running followed forwards in different modes, and what is said of it.

    Args:
        backwards: how many these were before.
        rank: of this process.
        size: the number of ranks.
        modes: by the name in `MODES`, how many ranks have run the forward of this averaged backward in it, and whether
            this rank has.
    """
    other = {name: found for name, found in modes.items() if 0 < found[0] < size}
    backwards = backwards + 1 if other else 0
    if backwards < BACKWARDS:
        return backwards, None
    ran = [
        f"{count} of {size} {MODES[name][0]}, this rank {'among them' if here else 'not'}"
        for name, (count, here) in other.items()
    ]
    do = " and ".join(dict.fromkeys(MODES[name][1] for name in other))
    return backwards, (
        f"rank {rank}: in {BACKWARDS} backwards running, the ranks had run their forwards in "
        f"different modes: {'; '.join(ran)}. Expected the same on every rank: {do}."
    )
