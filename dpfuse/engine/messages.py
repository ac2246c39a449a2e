"""How a backward went, in words: what errors and warnings say. Knows names and ranks, no bucket and no tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from dpfuse.engine.window import ELSEWHERE, Counts
from dpfuse.errors import DPFuseError

__all__ = [
    "begun", "changed", "discarded", "failed", "interrupted", "nonfinite", "strayed", "unread", "unsettled", "unused",
    "weightless",
]  # fmt: skip

DIFFERENCES: dict[str, tuple[Callable[[int], str], str]] = {  # by field of `Counts`: what is so, and the remedy
    "wrapper": (
        lambda number: f"averages the gradients of the wrapped model number {number} of its group",
        "Run the backwards of several wrapped models in the same order everywhere.",
    ),
    # Before the number of backwards, which who weighs gradients does not tell.
    "handling": (
        lambda number: _handling(number - 1),
        "Pass the losses of all ranks through the dpfuse.GradScaler, or of none; call set_gradient_weight() on all "
        "ranks, with one reduction, or on none. set_gradient_weight(None) takes a weight back. Where an exception "
        "ended a backward inside no_sync(), zero the gradients, give the weight again, and begin with the first batch "
        "of the window.",
    ),
    "backwards": (
        lambda number: f"has run {_counted(number, 'backward')} since the last averaged one",
        "Enter no_sync() on all ranks or on none, and for as many batches; where windows are to differ in length, call "
        "set_gradient_weight() for each. Where one rank would skip a batch, its loss can be multiplied "
        "by 0; torch.autograd.grad gives gradients that are not to be averaged.",
    ),
    "forwards": (
        lambda number: f"has run {_counted(number - 1, 'forward')} without a backward",
        "Skip a batch on all ranks or on none, whatever went wrong in it. Forwards without a backward belong under "
        "torch.no_grad() or in eval mode; where ranks may use different outputs, pass find_unused_parameters=True.",
    ),
}
CONSEQUENCE = "No rank's gradients of this backward are averaged: zero them before the next one."


def failed(rank: int, size: int, ranks: Collection[int], error: Exception | None, late: Sequence[str]) -> str:
    """What to say on `rank` when the backward of `ranks` failed.

    Args:
        rank, size: of this process and its group.
        ranks: those that failed.
        error: what happened here, if anything.
        late: parameters of this rank that became ready after their bucket was sent.
    """
    if rank not in ranks:
        return (
            f"the backward failed on rank {_listed(ranks)} of {size}, and rank {rank} "
            f"cannot have its gradients; see the error there. {CONSEQUENCE}"
        )
    if isinstance(error, DPFuseError):
        return f"rank {rank}: {str(error).rstrip('.')}. {CONSEQUENCE}"
    if error is not None:
        return f"rank {rank} could not pack its gradients: {str(error).rstrip('.')}. {CONSEQUENCE}"
    return (
        f"on rank {rank} {_named(late)} became ready after its bucket was sent; expected "
        "as many times in a backward as in the first synchronised one. Use it equally often in every "
        f"step, or run such steps inside no_sync() and call dpfuse.fused_allreduce_gradients(). {CONSEQUENCE}"
    )


def changed(rank: int, size: int, ranks: Collection[int], change: str) -> str:
    """What to say on `rank` when only `ranks` have another model; `change` is that of this rank."""
    here = f"rank {rank}: {change} after the module was wrapped; the" if rank in ranks else f"rank {rank}: the"
    others = [other for other in range(size) if other not in ranks]
    return (
        f"{here} module was changed on rank {_listed(ranks)} of {size} since the last synchronised backward, and not "
        f"on rank {_listed(others)}; expected the same change on every rank. Make it on all of them, or undo it. "
        f"A call of autotune is one, too. {CONSEQUENCE}"
    )


def strayed(rank: int, counts: Sequence[Counts]) -> str:
    """What to say on `rank` when the ranks are not where the others are; `counts` by rank."""
    compared = {other: of_rank for other, of_rank in enumerate(counts) if of_rank != ELSEWHERE}
    first = min(compared)
    other = next(other for other, of_rank in compared.items() if of_rank != compared[first])
    field = next(name for name in DIFFERENCES if getattr(compared[first], name) != getattr(compared[other], name))
    words, remedy = DIFFERENCES[field]
    here, there = (words(getattr(compared[place], field)) for place in (first, other))
    what = f"rank {rank}: rank {other} {there}, rank {first} {here}; expected the same on every rank"
    return f"{what}. {remedy} {CONSEQUENCE}"


def weightless(rank: int, step: int, weights: Sequence[float]) -> str:
    """What to say on every rank when the weights of all, by rank, gave no mean in backward `step`."""
    given = ", ".join(f"{weight:g}" for weight in weights)
    return (
        f"rank {rank}: in synchronised backward {step} the ranks 0 to {len(weights) - 1} gave their gradients the "
        f"weights {given}; expected finite ones, 0 or more, and one above 0. The gradients are NaN: zero them before "
        "the next backward."
    )


def interrupted(ranks: Collection[int], size: int) -> str:
    """What to say on every rank when an exception ended the last backward on `ranks` only."""
    return (
        f"the last backward was interrupted by an exception on rank {_listed(ranks)} of "
        f"{size} only; expected all ranks to end it alike. Its gradients are not averaged: "
        "zero them on every rank and repeat the step."
    )


def begun(rank: int) -> str:
    """What to say on `rank` where a backward that nothing announced follows one that died."""
    return (
        f"rank {rank}: an exception ended the last backward after it had sent gradients, and this one began without a "
        "forward of the wrapper; expected one before it, in which what was sent is cleared away. What this backward "
        "has added is lost: zero the gradients on every rank and repeat the step."
    )


def unused(rank: int, names: Sequence[str], nowhere: int) -> str:
    """What to say of parameters without gradient on `rank`, `nowhere` of which were used on no rank."""
    return (
        f"rank {rank}: {_named(names)} got no gradient in this backward; "
        f"{nowhere} of these were used on no rank and stay without, the others got the mean over "
        "all ranks with zero from here. Pass find_unused_parameters=True if that is meant."
    )


def nonfinite(step: int, counts: Mapping[str, int]) -> str:
    """What to say of the values, by parameter, that were NaN or infinite in what this rank sent in backward `step`."""
    names = list(counts)
    parts = [f"{counts[name]} in {name!r}" for name in names[:10]]
    more = f" and {sum(counts[name] for name in names[10:])} in {len(names) - 10} more" if len(names) > 10 else ""
    return (
        f"in synchronised backward {step} this rank sent {sum(counts.values())} gradient values that are NaN or "
        f"infinite: {', '.join(parts)}{more}. Expected finite ones: look at the loss, the input and the learning rate "
        'there. A GradScaler skips such steps by itself: with one, pass check_finite="off"'
    )


def discarded(count: int) -> str:
    """What to say where an exception ended a window in which `count` parameters had gradients in buckets."""
    return (
        f"an exception ended a backward inside no_sync(), and what was accumulated in the buckets before, "
        f"for {count} parameter{'s' * (count != 1)}, was thrown away. Zero the gradients, and begin again with the "
        "first batch since the last synchronised backward."
    )


def unread(names: Sequence[str]) -> str:
    """What to say of parameters without gradient in a backward that is captured in a CUDA graph."""
    return (
        f"{_named(names)} got no gradient in a backward that a CUDA graph captures, and whether another rank has one "
        "cannot be read meanwhile; expected a gradient for each. Freeze what the captured step does not use"
    )


def unsettled(rank: int) -> str:
    """What to say on `rank` where the first synchronised backward of a model is to be captured in a CUDA graph."""
    return (
        f"rank {rank}: the first synchronised backward of a model is captured in a CUDA graph; expected some steps "
        "before the capture, for the ranks agree on the buckets after that backward. Run at least three steps first, "
        "and keep gradients with zero_grad(set_to_none=False)."
    )


def _handling(what: int) -> str:
    """What `Canary.handling` means, in words."""
    means = {
        1: "divides its gradients by the scale of its loss",
        2: "weighs its gradients",
        4: "weighs gradients of sums",
        8: "goes on after a backward that an exception ended",
    }
    return " and ".join(words for bit, words in means.items() if what & bit) or "averages its gradients as they are"


def _named(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - 10} more" if len(quoted) > 10 else ""
    return f"parameter{'s' * (len(quoted) > 1)} {', '.join(quoted[:10])}{more}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, ranks))
