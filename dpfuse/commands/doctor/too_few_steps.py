"""Which checks had too few steps to say anything. Each check knows how many it needs; traces tell what there was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dpfuse.commands.doctor.runs import Run
from dpfuse.loop.compared_words import FIRST
from dpfuse.rules import (
    calls_around_steps,
    l02_nothing_averaged,
    l04_never_stepped,
    l05_same_batches,
    l07_other_rates,
    l08_other_modes,
    l11_same_order,
    l13_zeroed_in_window,
    l14_clipped_while_scaled,
    windows,
)
from dpfuse.rules.codes import (
    CLIPPED_SCALED,
    CUT_WINDOW,
    NEVER_STEPPED,
    NEVER_ZEROED,
    NOTHING_AVERAGED,
    OTHER_MODES,
    OTHER_RATES,
    SAME_BATCHES,
    SAME_ORDER,
    SCHEDULE_PER_BATCH,
    ZEROED_IN_WINDOW,
)
from dpfuse.trace_file import RankTrace

__all__ = ["too_few_steps"]

# Averaged backwards, after which a rule says what it has found. Ranks compare from the fourth on; a GPU tells of it one
# backward later.
AVERAGES = {
    NEVER_STEPPED: l04_never_stepped.BEGIN + l04_never_stepped.AVERAGES + 1,
    SAME_BATCHES: FIRST + l05_same_batches.STEPS + 1,
    OTHER_RATES: FIRST + l07_other_rates.BACKWARDS + 1,
    OTHER_MODES: FIRST + l08_other_modes.BACKWARDS + 1,
}
# Of a model of which an optimizer has stepped on a part: another one may begin late.
LATE = {NEVER_STEPPED: l04_never_stepped.BEGIN + l04_never_stepped.LATER + 1}
# Steps. The first one of an optimizer is not counted. A window cut short counts after usual ones, and if weights still
# differ a step later.
STEPS = {
    NOTHING_AVERAGED: l02_nothing_averaged.STEPS + 1,
    CUT_WINDOW: windows.USUAL + 2,
    NEVER_ZEROED: calls_around_steps.HABIT + 1,
    ZEROED_IN_WINDOW: l13_zeroed_in_window.ZEROED + 1,
    CLIPPED_SCALED: l14_clipped_while_scaled.CLIPPED + 1,
    SCHEDULE_PER_BATCH: calls_around_steps.HABIT + 1,
}


def too_few_steps(runs: Sequence[Run], found: Sequence[str]) -> tuple[str, ...]:
    """Return what each check needs that has said nothing for want of it, and what it had.

    Args:
        runs: those under dpfuse, whose own checks look at them.
        found: the codes of what was found.
    """
    traces = [run.traces[0] for run in runs if run.traces]
    if not traces:
        return ()
    steps = min(
        (max(Counter(line["optimizer"] for line in one.steps).values(), default=0) for one in traces), default=0
    )
    averages = min(map(_averages_of, traces), default=0)
    late = LATE if any(l04_never_stepped.unstepped(run.traces) for run in runs if run.traces) else {}
    of_averages = "steps" if averages == steps else "averaged backwards"
    needs = [(code, need, steps, "steps") for code, need in STEPS.items()]
    needs += [(code, need, averages, of_averages) for code, need in {**AVERAGES, **late}.items()]
    passes = [max(counts) for run in runs if (counts := l11_same_order.passes_of(run.samplers))]
    needs += [(SAME_ORDER, l11_same_order.PASSES, min(passes), "passes over a sampler")] if passes else []
    return tuple(
        f"{code} needs {need:,} {unit}, had {had:,}"
        for code, need, had, unit in sorted(needs)
        if had < need and code not in found
    )


def _averages_of(trace: RankTrace) -> int:
    """Return how many backwards were averaged, of the model that has fewest."""
    counts = Counter(model for line in trace.steps for one in line["backwards"] for model in windows.averages_in(one))
    return min(counts.values(), default=0)
