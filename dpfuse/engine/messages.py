"""The texts of errors and warnings about a backward. Knows names and ranks, no bucket and no tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dpfuse.engine.reading import Reading
from dpfuse.engine.report_format import FROZEN
from dpfuse.engine.report_layout import Field
from dpfuse.errors import DPFuseError

__all__ = [
    "begun", "captured_first", "changed", "differing", "discarded", "drained", "failed", "held_up", "nonfinite",
    "unaveraged", "unread", "unused", "weightless",
]  # fmt: skip

HEARD_LATE = (
    "This is told one backward late, since no rank waits for its device. A program that skips a batch needs "
    'check="strict": then all ranks hear of it in the same backward.'
)
CONSEQUENCE = "No rank's gradients of this backward are averaged: zero them before the next one."


def failed(
    rank: int,
    size: int,
    ranks: Collection[int],
    here: bool,
    error: Exception | None,
    late: Sequence[str],
    *,
    out_of_memory: bool = False,
) -> str:
    """What to say on `rank` when a backward failed.

    Args:
        rank, size: of this process and its group.
        ranks: those that failed, if they are known.
        here: whether this rank failed.
        error: what happened here, if anything.
        late: parameters of this rank that became ready after their bucket was sent.
        out_of_memory: whether a rank failed because its memory ran out.
    """
    if not here:
        told = "memory ran out there" if out_of_memory else "read the error there"
        return (
            f"the backward failed on {_ranks(ranks)} of {size}, so rank {rank} has no averaged gradients; {told}. "
            f"{CONSEQUENCE}"
        )
    if isinstance(error, DPFuseError):
        return f"rank {rank}: {str(error).rstrip('.')}. {CONSEQUENCE}"
    if error is not None:
        return f"rank {rank} could not pack its gradients: {str(error).rstrip('.')}. {CONSEQUENCE}"
    return (
        f"on rank {rank} {_named(late)} became ready after its bucket was sent; expected "
        "as many times in a backward as in the first synchronised one, and all of it through autograd. With "
        "find_unused_parameters=True, pass use_reentrant=False to checkpoints. Use it equally often in every "
        f"step, or run such steps inside no_sync() and call dpfuse.fused_allreduce_gradients(). {CONSEQUENCE}"
    )


def changed(rank: int, size: int, ranks: Collection[int], here: bool, change: str) -> str:
    """What to say on `rank` when only some ranks, `ranks` if they are known, have another model.

    Args:
        rank, size: of this process and its group.
        ranks: those whose model has changed, if they are known.
        here: whether the model of this rank has changed.
        change: what has changed on this rank, in words.
    """
    beginning = f"rank {rank}: {change} after the module was wrapped; the" if here else f"rank {rank}: the"
    others = [other for other in range(size) if other not in ranks]
    unchanged = f"rank {_listed(others)}" if ranks else "the other ranks"
    return (
        f"{beginning} module was changed on {_ranks(ranks)} of {size} since the last synchronised backward, and not "
        f"on {unchanged}; expected the same change on every rank. Make it on all of them, or undo it. "
        f"A call of autotune is a change, too. {CONSEQUENCE}"
    )


def differing(rank: int, fields: Sequence[Field], reading: Reading) -> str:
    """What to say on `rank` where ranks differ in something that should be equal."""
    field = next((each for each in fields if each.name in reading.differing), None)
    if field is None:
        return _differently_frozen(rank, reading) if FROZEN in reading.differing else _somehow(rank, fields)
    rest = f"expected the same on every rank. {field.remedy} {CONSEQUENCE}"
    place = list(fields).index(field)
    rows = {other: row.numbers[place] for other, row in enumerate(reading.rows) if row.is_compared}
    if not rows:
        return f"rank {rank}: this rank {field.words(field.value())}, and another rank does not; {rest}"
    first = min(rows)
    other = next(other for other in rows if rows[other] != rows[first])
    here, there = field.words(rows[first]), field.words(rows[other])
    return f"rank {rank}: rank {other} {there}, rank {first} {here}; {rest}"


def _differently_frozen(rank: int, reading: Reading) -> str:
    counts = [row.frozen for row in reading.rows if row.is_compared]
    told = f" ({', '.join(map(str, counts))} of them, by rank)" if counts else ""
    return (
        f"rank {rank}: the ranks have frozen different parameters since the module was wrapped{told}; expected the "
        f"same requires_grad on every rank. Freeze and unfreeze the same parameters everywhere. {CONSEQUENCE}"
    )


def _somehow(rank: int, fields: Sequence[Field]) -> str:
    """What to say on `rank` where ranks differ, and only a hash of all fields tells it."""
    names = ", ".join(field.name for field in fields)
    told = " and ".join(field.words(number) for field in fields if (number := field.value()))
    return (
        f"rank {rank}: the ranks differ in one of these numbers, or in which parameters they have frozen: {names}. "
        f"This rank {told or 'has 0 in each of them'}; expected the same on every rank. Compare it with the errors of "
        f"the other ranks, and do the same everywhere: as many batches inside no_sync(), for example. {CONSEQUENCE}"
    )


def held_up(rank: int, names: Sequence[str], backwards: int) -> str:
    """What to say of parameters without a gradient, for which their bucket and all later ones have waited."""
    return (
        f"rank {rank}: {_named(names)} did not become ready in {backwards} backwards, so their bucket and all later "
        "ones were sent only after backward had ended; expected a gradient in every backward. Freeze parameters that "
        "are not used (requires_grad=False), on every rank, or wrap the module again without them."
    )


def unaveraged(rank: int, names: Sequence[str]) -> str:
    """What to say of parameters that got gradients in a backward that the wrapper did not notice."""
    return (
        f"rank {rank}: a backward outside no_sync() went through no output of the wrapper, so the gradients of "
        f"{_named(names)} were not averaged; expected a forward of the wrapper. Call the wrapper "
        "instead of its .module, or run such backwards inside no_sync() and call "
        "dpfuse.fused_allreduce_gradients(). Add a penalty on parameters to the loss, or run its backward first, "
        "inside no_sync(). Zero the gradients before the next backward."
    )


def weightless(rank: int, step: int, weights: Sequence[float]) -> str:
    """What to say on every rank when the weights of all, by rank if they are known, gave no mean in backward `step`."""
    given = ", ".join(f"{weight:g}" for weight in weights)
    told = (
        f"the ranks 0 to {len(weights) - 1} gave their gradients the weights {given}"
        if weights
        else "the weights that the ranks gave their gradients make no mean"
    )
    return (
        f"rank {rank}: in synchronised backward {step} {told}; expected finite ones, 0 or more, and one above 0. The "
        "gradients are NaN: zero them before the next backward."
    )


def drained(rank: int, *, completed: bool) -> str:
    """What the log of `rank` says once it has completed what the peers waited for in a backward that died."""
    if completed:
        return f"rank {rank}: an exception ended the last backward after its mean was known; all ranks hear of it next"
    return f"rank {rank}: an exception ended the last backward; it was completed with zeros, and the peers have failed"


def begun(rank: int) -> str:
    """What to say on `rank` where a backward without a forward of the wrapper follows one that raised."""
    return (
        f"rank {rank}: an exception ended the last backward after it had sent gradients, and this one began without a "
        "forward of the wrapper; expected such a forward first, which completes what was sent. What this backward "
        "has added is lost: zero the gradients on every rank and repeat the step."
    )


def unused(rank: int, names: Sequence[str], nowhere: int) -> str:
    """What to say of parameters without gradient on `rank`, `nowhere` of which were used on no rank."""
    kept, averaged = "keep .grad as it was", "hold the mean over all ranks, with zeros from this one"
    if nowhere == len(names):
        told = f"no rank used them, so they {kept}"
    elif not nowhere:
        told = f"other ranks used them, so they {averaged}"
    else:
        told = f"no rank used {nowhere} of them, which {kept}; the others {averaged}"
    return (
        f"rank {rank}: {_named(names)} got no gradient in this backward; {told}. Expected a gradient for each "
        "trainable parameter: use them in the loss, freeze them, or pass find_unused_parameters=True if that is "
        "intended."
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
        f"{_named(names)} got no gradient in a backward that a CUDA graph captures, and a capture cannot read "
        "whether another rank has one; expected a gradient for each. Freeze what the captured step does not use"
    )


def captured_first(rank: int) -> str:
    """What to say on `rank` where the first synchronised backward of a model is to be captured in a CUDA graph."""
    return (
        f"rank {rank}: the first synchronised backward of a model is captured in a CUDA graph; expected some steps "
        "before the capture, since the ranks agree on the buckets after that backward. Run at least three steps first, "
        "and keep gradients with zero_grad(set_to_none=False)."
    )


def _named(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - 10} more" if len(quoted) > 10 else ""
    return f"parameter{'s' * (len(quoted) > 1)} {', '.join(quoted[:10])}{more}"


def _ranks(ranks: Collection[int]) -> str:
    return f"rank {_listed(ranks)}" if ranks else "several ranks"


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, ranks))
