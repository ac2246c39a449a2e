"""What is wrong with the program, apart from its numbers: warnings and errors of dpfuse, and what traces show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpfuse.commands.doctor.runs import Run
from dpfuse.commands.doctor.skipped_steps import skipped_of
from dpfuse.commands.doctor.speed import Link, Speed, Timing
from dpfuse.rules import (
    averaged_twice,
    hooked_on_some_ranks,
    l03_cut_window,
    l04_never_stepped,
    l05_same_batches,
    l06_changed_in_window,
    l07_other_rates,
    l09_group_of_one,
    l10_each_averaged,
    l11_same_order,
    l12_never_zeroed,
    l13_zeroed_in_window,
    l14_clipped_while_scaled,
    l15_schedule_per_batch,
    left_out_step,
    not_finite,
    own_buffers,
    unused_parameters,
    w01_weights_differ,
)
from dpfuse.rules.codes import (
    ALONE,
    CHANGED_IN_WINDOW,
    CLIPPED_SCALED,
    CUT_WINDOW,
    EACH_AVERAGED,
    NEVER_STEPPED,
    NEVER_ZEROED,
    OTHER_RATES,
    SAME_BATCHES,
    SAME_ORDER,
    SCHEDULE_PER_BATCH,
    WEIGHTS,
    ZEROED_IN_WINDOW,
)
from dpfuse.rules.seen import Seen, Traces

__all__ = ["Finding", "findings_of", "remarks_of"]

SKIPS = "a GradScaler skips steps"
SLOW_RANK, SLOW_LOADER = "a rank is slow", "the loader is slow"
LOST = 0.1  # of a step: less is not told
NOTICED = 5e-3  # seconds of a step: a loader of a toy takes a tenth of nothing
# What is wrong with weights, in this order: one tells of a step, which dpfuse's own message may get.
OF_WEIGHTS = (w01_weights_differ.TITLE, left_out_step.TITLE)
CHECKED = {w01_weights_differ.TITLE: WEIGHTS, l05_same_batches.TITLE: SAME_BATCHES}  # dpfuse's own checks find these
LOGGED = {ALONE: l09_group_of_one.TITLE}  # what dpfuse logs only, and here is wrong
Rule = Callable[[Traces], Seen | None]
# Rules that look at traces alone, and the code of each. None is a finding: each may be right on purpose, as it says.
REMARKS: tuple[tuple[str, Rule], ...] = (
    (CUT_WINDOW, l03_cut_window.find_unaveraged_step),
    (CUT_WINDOW, l03_cut_window.find_lost_batches),
    (CHANGED_IN_WINDOW, l06_changed_in_window.find),
    (NEVER_ZEROED, l12_never_zeroed.find),
    (ZEROED_IN_WINDOW, l13_zeroed_in_window.find),
    (CLIPPED_SCALED, l14_clipped_while_scaled.find),
    (SCHEDULE_PER_BATCH, l15_schedule_per_batch.find),
    ("", hooked_on_some_ranks.find),
    (SAME_BATCHES, l05_same_batches.find_parts),
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        code: such as "DPF-W01"; empty where there is none.
        title: in a few words.
        text: what was got, what was expected, and what to do.
        where: the runs in which it was seen.
        step, rank, parameter: of the place, where they are known.
    """

    code: str
    title: str
    text: str
    where: tuple[str, ...]
    step: int | None = None
    rank: int | None = None
    parameter: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def findings_of(runs: Sequence[Run], speed: Speed | None = None) -> tuple[Finding, ...]:
    """Return what is wrong; the same thing in several runs counts once. What is not finite comes first.

    Args:
        runs: those that are compared.
        speed: of these runs; None where it was not measured.
    """
    of_values = [(run, finding) for run in runs for finding in _not_finite(run)]
    # The trace of a rank that has failed is shorter, and no step was left out.
    traced = [(run, finding) for run in runs if not run.failed and run.traces for finding in _traced(run)]
    exact = next((one for title in OF_WEIGHTS for _, one in traced if one.title == title), None)
    said = [(run, _with_the_rates(_with_the_step(finding, exact), run)) for run in runs for finding in _said(run)]
    seen = {finding.code for _, finding in said} | {finding.title for _, finding in said}
    unsaid = [(run, one) for run, one in traced if not {CHECKED.get(one.title), one.title} & seen]
    return (*_once([*of_values, *said, *unsaid]), *(_lost_time(speed) if speed is not None else ()))


def remarks_of(runs: Sequence[Run], link: Link | None) -> tuple[Finding, ...]:
    """Return what may be meant so: what windows show, what costs time, buffers that each rank keeps.

    Args:
        runs: those that are compared.
        link: how gradients travel; None where it was not measured.
    """
    logged = [(run, finding) for run in runs for finding in _noted(run, "log") if finding.code not in LOGGED]
    with_traces = [run for run in runs if run.traces]
    shown = [(run, finding) for run in with_traces for finding in _may_be_meant(run, link)]
    return _once([*logged, *shown])


def _lost_time(speed: Speed) -> Iterator[Finding]:
    """Yield a rank, or else a loader, that costs much of each step in at least half of the runs.

    On a busy machine it must be the same rank in all runs, and a loader may wait for others.
    """
    timings = speed.timings
    late = {one.run: one.slowest for one in timings if one.slowest and _is_much(one.slowest.seconds, one)}
    names = [(one.rank, one.part) for one in late.values()]
    if names:
        often = max(names, key=names.count)
        where = tuple(run for run, one in late.items() if (one.rank, one.part) == often)
        if 2 * len(where) >= len(timings) * (1 + speed.is_busy):
            slowest, timing = late[where[0]], next(one for one in timings if one.run == where[0])
            text = (
                f"{slowest.explain()}, {slowest.seconds / timing.mean:.0%} of a step. The others wait for it. Expected "
                "the same work on every rank: look at what this rank alone does there, at its part of the data, and at "
                "other programs on its machine."
            )
            yield Finding("", SLOW_RANK, text, where)
            return
    # The trace waits for a GPU after each step. Without a trace, the work of the GPU hides as much of the loader.
    lost = {one.run: one.parts["loader"] - one.parts["device"] for one in timings}
    waits = [one for one in timings if _is_much(lost[one.run], one)]
    if waits and not speed.is_busy and 2 * len(waits) >= len(timings):
        first = waits[0]
        line = f" ({first.lines['loader']})" if first.lines.get("loader") else ""
        text = (
            f"each step waits {1e3 * lost[first.run]:.3g} ms for its batch{line}, "
            f"{lost[first.run] / first.mean:.0%} of the step. Expected batches that are ready: pass more num_workers "
            "to the DataLoader, or do less for each sample."
        )
        yield Finding("", SLOW_LOADER, text, tuple(one.run for one in waits))


def _is_much(seconds: float, timing: Timing) -> bool:
    return seconds > max(LOST * timing.mean, NOTICED)


def _with_the_step(said: Finding, exact: Finding | None) -> Finding:
    """Return what dpfuse has said of weights that differ, with the step that a trace shows."""
    if said.code != WEIGHTS or exact is None:
        return said
    return Finding(WEIGHTS, exact.title, f"{exact.text} {w01_weights_differ.kind_in(said.text)}".strip(), ())


def _with_the_rates(said: Finding, run: Run) -> Finding:
    """Return what dpfuse has said of learning rates that differ, with that of each rank."""
    seen = l07_other_rates.find(run.traces) if said.code == OTHER_RATES else None
    return said if seen is None else replace(said, title=seen.title, text=seen.text)


def _once(found: Sequence[tuple[Run, Finding]]) -> tuple[Finding, ...]:
    merged: dict[tuple[str, str], Finding] = {}
    for run, finding in found:
        # With a code, the text may name other steps in each run.
        key = (finding.code, "" if finding.code else finding.text)
        kept = merged.get(key, finding)
        if run.title not in kept.where:
            merged[key] = replace(kept, where=(*kept.where, run.title))
    return tuple(merged.values())


def _findings(code: str, seen: Iterable[Seen | None]) -> Iterator[Finding]:
    """Yield what rules of one code have seen."""
    for one in seen:
        if one is not None:
            yield Finding(code, one.title, one.text, (), one.step, one.rank, one.parameter)


def _not_finite(run: Run) -> Iterator[Finding]:
    """Yield that a step used values that are not finite, or that many steps were skipped for them."""
    yield from _findings("", [not_finite.find(run.traces)])
    for one in () if run.failed else skipped_of([run]):
        if one.too_many:
            first = not_finite.first_in_backward(run.traces)
            text = (
                f"{one.explain()}, since gradients were not finite{f'; first {first}' if first else ''}. A skipped "
                "step changes no weight. Expected a few in the beginning, until the scale fits. If it goes on, a loss "
                "or a gradient is NaN or infinite at any scale: torch.autograd.set_detect_anomaly(True) names the "
                "operation that makes a NaN."
            )
            yield Finding("", SKIPS, text, ())


def _said(run: Run) -> Iterator[Finding]:
    """Yield what dpfuse has warned of in a run, or raised, or logged though it is wrong."""
    for what in ("warning", "error"):
        yield from _noted(run, what)
    yield from (finding for finding in _noted(run, "log") if finding.code in LOGGED)


def _noted(run: Run, what: str) -> Iterator[Finding]:
    seen: set[str] = set()
    for facts in run.facts.values():
        for note in facts["findings"]:
            if note["what"] != what or (what != "warning" and not note["code"]):
                continue  # an error without a code is the end of a run, which is told of otherwise
            if note["kind"] in ("FutureWarning", "DeprecationWarning", "PendingDeprecationWarning"):
                continue
            text = note["text"].removeprefix(f"{note['code']}: ") if note["code"] else note["text"]
            key = note["code"] or text
            if key not in seen:
                seen.add(key)
                kind = {"warning": "a warning", "error": "an error", "log": "a remark"}[what]
                title = LOGGED.get(note["code"], f"{kind} of dpfuse ({note['kind']})")
                yield Finding(note["code"], title, text, ())


def _traced(run: Run) -> Iterator[Finding]:
    """Yield what rules see that is wrong for certain."""
    traces = run.traces
    yield from _findings("", [averaged_twice.find(traces)])
    yield from _findings(SAME_ORDER, [l11_same_order.find(run.samplers)])
    unused = [facts["unused"] for facts in run.facts.values()]
    one_by_one = [
        l09_group_of_one.find(traces),
        left_out_step.find(traces, run.behind),
        *unused_parameters.find(traces, unused, run.of_optimizers),
        w01_weights_differ.find(traces),
        l05_same_batches.find(traces),
    ]
    yield from _findings("", one_by_one)


def _may_be_meant(run: Run, link: Link | None) -> Iterator[Finding]:
    """Yield what rules see that a program may mean."""
    traces = run.traces
    for code, rule in REMARKS:
        yield from _findings(code, [rule(traces)])
    yield from _findings(NEVER_STEPPED, [l04_never_stepped.find(traces, run.of_optimizers)])
    yield from _findings("", own_buffers.find(traces))
    if link is not None:
        yield from _findings(EACH_AVERAGED, l10_each_averaged.find(traces, link.exposed, link.step))
