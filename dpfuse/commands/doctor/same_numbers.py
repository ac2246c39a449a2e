"""Are the numbers of dpfuse those of DDP? Judges traces of several runs; some programs differ from themselves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from dpfuse.commands.doctor.runs import Run
from dpfuse.trace.comparison import Difference, compare, first_setting
from dpfuse.trace_file import NOT_FINITE, SKIPPED, RankTrace

__all__ = ["EXACT_RANKS", "Numbers", "curve_of", "judge", "losses_of"]

FARTHER = 4.0  # times DDP's distance from itself: less is the luck of rounding
GRADIENT, LOSS = 1e-4, 1e-3  # relative distances in later steps, to which rounding may have grown
ROUNDING = 1e-5  # relative distance of the first gradients: more is no rounding
EXACT_RANKS = 2  # up to which the order of a sum does not matter


@dataclass(frozen=True)
class Numbers:
    """What was found.

    Args:
        result: "equal" (bits), "close" (as close as DDP to itself), "different", "itself" (the program differs from
            itself), "void" (a run has read what another one wrote) or "unknown".
        text: for people, one or two sentences.
        steps: that were compared.
        difference: the first one, where there is one.
    """

    result: str
    text: str
    steps: int
    difference: Difference | None = None

    @property
    def fine(self) -> bool:
        """Whether dpfuse computes what DDP computes, as far as that can be said."""
        return self.result in ("equal", "close")


def judge(torch_runs: Sequence[Run], our_runs: Sequence[Run], other: Run | None, resumed: Sequence[str]) -> Numbers:
    """Compare the runs.

    Args:
        torch_runs: under DDP, at least one.
        our_runs: under dpfuse, at least one.
        other: under DDP with other buckets, from three ranks on.
        resumed: files that a run has written and a later one has read.
    """
    first, ours = torch_runs[0], our_runs[0]
    steps = min(run.steps for run in (*torch_runs, *our_runs))
    if not steps:
        run = next(run for run in (*torch_runs, *our_runs) if not run.steps)
        idle = [rank for rank, trace in run.traces.items() if not trace.steps]
        reason = "a run has ended before its first optimizer step"
        if len(idle) < len(run.traces):
            reason = f"rank {idle[0]} makes no step of an optimizer, and others do"
        return Numbers("unknown", f"No step was compared: {reason}.", 0)
    for again in (*torch_runs[1:], *our_runs[1:]):
        before = first if again.wrapper == "torch" else ours
        found = compare(before.traces, again.traces)
        if found is None:
            continue
        if _starts_elsewhere(found) and resumed:
            return _void(resumed, steps, found)
        text = (
            f"The program differs from itself: {before.title} and {again.title} had the same seeds and part at "
            f"{_place(found)}. Nothing can be said about dpfuse before that is repaired."
        )
        return Numbers("itself", text, steps, found)
    found = compare(first.traces, ours.traces)
    if found is None:
        made = f"{steps} steps{first.of_optimizers}"
        return Numbers("equal", f"Losses and weights have the same bits as under DDP, in {made}.", steps)
    if _starts_elsewhere(found) and resumed:
        return _void(resumed, steps, found)
    if len(torch_runs) < 2:
        text = (
            f"dpfuse differs from DDP, first at {_place(found)}. The program was run once under DDP, so it cannot be "
            "said whether it differs from itself."
        )
        return Numbers("unknown", text, steps, found)
    if ours.numeric:
        text = (
            f"dpfuse differs from DDP, first at {_place(found)}. The program passes {', '.join(ours.numeric)}, which "
            "torch's class does not have, so numbers were to differ. To compare the rest, leave that out for one run."
        )
        return Numbers("unknown", text, steps, found)
    if len(first.traces) <= EXACT_RANKS:
        return Numbers("different", f"dpfuse differs from DDP, first at {_place(found)}.", steps, found)
    if other is None or other.failed or not other.steps:
        return _without_distance(first, ours, other, found)
    return _by_distance(first, ours, other, found)


def _without_distance(first: Run, ours: Run, other: Run | None, found: Difference) -> Numbers:
    """Judge where there is no run of DDP with other buckets, which would tell rounding from an error."""
    steps = min(first.steps, ours.steps)
    setting = first_setting(first.traces, ours.traces)
    if setting is not None:
        return Numbers("different", f"dpfuse differs from DDP at {_place(setting)}.", steps, setting)
    reason = "there was none"
    if other is not None:
        reason = f"it has failed: {other.reason()}" if other.failed else "it has made no step"
    text = (
        f"dpfuse differs from DDP, first at {_place(found)}. From three ranks on, this may be rounding. A run of DDP "
        f"with other buckets would tell, and {reason}."
    )
    return Numbers("unknown", text, steps, found)


def _by_distance(first: Run, ours: Run, other: Run, found: Difference) -> Numbers:
    """Judge by distances: from three ranks on, other buckets round sums in another order.

    Weights alone do not tell: Adam makes a whole step of a gradient that is nothing but rounding, such as that of a
    bias before batch normalization. So gradients are judged, which are large where it matters, and losses.
    """
    steps = min(run.steps for run in (first, ours, other))
    gradients = _gradient_distances(first, ours), _gradient_distances(first, other)
    losses = _loss_distance(first, ours), _loss_distance(first, other)
    spread = (
        f"gradients lie {gradients[0][0]:.1e} from DDP's in the first step, and losses {losses[0]:.1e}; with other "
        f"buckets DDP's own lie {gradients[1][0]:.1e} and {losses[1]:.1e} from them (relative)"
    )
    setting = first_setting(first.traces, ours.traces)
    beyond = [
        step for step, pair in enumerate(zip(*gradients, strict=False)) if pair[0] > max(FARTHER * pair[1], GRADIENT)
    ]
    if setting is not None:
        text, found = f"dpfuse differs from DDP at {_place(setting)}.", setting
    elif gradients[0][0] > max(FARTHER * gradients[1][0], ROUNDING) or 2 * len(beyond) > len(gradients[0]):
        text = f"Farther than rounding explains: {spread}. First difference: {_place(found)}."
    elif losses[0] > max(FARTHER * losses[1], LOSS):
        text = f"Losses part farther than rounding explains: {spread}. First difference: {_place(found)}."
    else:
        text = f"Within rounding, as sums of three or more ranks are rounded in another order: {spread}."
        return Numbers("close", text, steps)
    return Numbers("different", text, steps, found)


def _gradient_distances(one: Run, other: Run) -> list[float]:
    """Return the distance of the gradients of each deep step, over their size."""
    found = []
    for ours, theirs in zip(one.traces[0].steps, other.traces[0].steps, strict=False):
        if "gradient sketch" in ours and "gradient sketch" in theirs:
            # An optimizer of one run may have got more parameters by then; what is missing counts as zeros.
            pairs = zip_longest(ours["gradient sketch"], theirs["gradient sketch"], fillvalue=0.0)
            apart = math.hypot(*(mine - yours for mine, yours in pairs))
            apart /= math.hypot(*ours["gradient sketch"]) or 1.0
            found.append(apart if math.isfinite(apart) else math.inf)  # NaN is as far as can be, and not near
    return found or [0.0]


def _loss_distance(one: Run, other: Run) -> float:
    """Return the relative distance of losses, the median over the second half of the steps."""
    pairs = list(zip(losses_of(one.traces[0]), losses_of(other.traces[0]), strict=False))
    apart = [_apart(ours, theirs) for ours, theirs in pairs[len(pairs) // 2 :]]
    return statistics.median(apart) if apart else 0.0


def _apart(one: float, other: float) -> float:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) / max(abs(one), abs(other), 1e-30)
    return 0.0 if repr(one) == repr(other) else math.inf


def _starts_elsewhere(found: Difference) -> bool:
    """Whether the runs differ from their start: other weights, another learning rate, another batch."""
    return found.step <= 0


def _void(resumed: Sequence[str], steps: int, found: Difference) -> Numbers:
    more = f" and {len(resumed) - 1} more" if len(resumed) > 1 else ""
    text = (
        f"The comparison is void: a run has read {resumed[0]}{more}, which an earlier run had written, and starts "
        "elsewhere. Give the program a folder that no run shares, or tell it not to resume."
    )
    return Numbers("void", text, steps, found)


def _place(found: Difference) -> str:
    parameter = f", {found.parameter}" if found.parameter else ""
    place = f"the start, rank {found.rank}" if found.step < 0 else found.place
    return f"{place}: {found.what}{parameter} (class: {found.cause})"


def losses_of(trace: RankTrace) -> list[float]:
    """Return the losses of `curve_of`, without steps that have none."""
    return [value for value in curve_of(trace) if value is not None]


def curve_of(trace: RankTrace, step: int | None = None) -> list[float | None]:
    """Return the last loss before each step of one optimizer; None for a step of another, or whose loss is no scalar.

    A loss may be NaN or infinite, which a trace holds as a text. One that a fused optimizer has skipped is left out.

    Args:
        trace: of one rank.
        step: one of the optimizer; None takes the first optimizer.
    """
    lines = trace.steps
    optimizer = 0 if step is None or step >= len(lines) else lines[step]["optimizer"]
    found: list[float | None] = []
    for line in lines:
        values = [float(one["value"]) for one in line["backwards"] if one["value"] is not None]
        known = values[-1] if values and line["optimizer"] == optimizer else None
        skipped = known is not None and not math.isfinite(known) and SKIPPED in line.get(NOT_FINITE, {})
        found.append(None if skipped else known)
    return found
