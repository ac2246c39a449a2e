"""What is wrong with the program, apart from its numbers: warnings and errors of dpfuse, and what traces show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpfuse.commands.doctor.cut_windows import changed_gradients, lost_batches, name_list, unaveraged_step
from dpfuse.commands.doctor.hooked_gradients import changed_on_some_ranks
from dpfuse.commands.doctor.loop_calls import (
    Seen,
    averaged_again,
    clipped_while_scaled,
    never_zeroed,
    schedule_per_batch,
    zeroed_in_windows,
)
from dpfuse.commands.doctor.not_finite import first_in_backward, first_not_finite
from dpfuse.commands.doctor.runs import Run
from dpfuse.commands.doctor.skipped_steps import skipped_of
from dpfuse.commands.doctor.speed import WORTH, Link, Speed, Timing
from dpfuse.commands.doctor.unstepped import unstepped
from dpfuse.findings import ALONE as ALONE_CODE
from dpfuse.findings import (
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
from dpfuse.trace.trace_file import BEFORE_STEP, HELD, MODULE_BUFFERS, RankTrace
from dpfuse.weights.finding import kind_in

__all__ = ["Finding", "findings_of", "remarks_of"]

DIFFER, SAME, ALONE = "the weights of the ranks differ", "the same batches on every rank", "a group of one rank"
LEFT_OUT, BUFFERS = "a rank leaves out steps", "buffers differ between ranks"
SKIPS = "a GradScaler skips steps"
TWICE = "gradients are averaged twice"
CHECKED = {DIFFER: WEIGHTS, SAME: SAME_BATCHES}  # dpfuse's own checks find these, too
LOGGED = {ALONE_CODE: ALONE}  # what dpfuse logs only, and here is wrong
SLOW_RANK, SLOW_LOADER = "a rank is slow", "the loader is slow"
LOST = 0.1  # of a step: less is not told
NOTICED = 5e-3  # seconds of a step: a loader of a toy takes a tenth of nothing
SHOWN = 3  # ranks of a list
PASSES = 3  # over a sampler that shuffles, after which its epoch was to be set
Look = Callable[[Mapping[int, RankTrace]], Seen | str | None]
# Codes, titles and looks at traces. None is a finding: each may be right on purpose, and the text says how.
LOOKS: tuple[tuple[str, str, Look], ...] = (
    (CUT_WINDOW, "a step on gradients that are not averaged", unaveraged_step),
    (CUT_WINDOW, "batches that teach nothing", lost_batches),
    (CHANGED_IN_WINDOW, "gradients are changed inside a window", changed_gradients),
    (NEVER_ZEROED, "gradients are never zeroed", never_zeroed),
    (ZEROED_IN_WINDOW, "gradients are zeroed inside a window", zeroed_in_windows),
    (CLIPPED_SCALED, "gradients are clipped while they are scaled", clipped_while_scaled),
    (SCHEDULE_PER_BATCH, "a schedule is stepped after each batch", schedule_per_batch),
    ("", "gradients are changed on some ranks", changed_on_some_ranks),
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
    not_finite = [(run, finding) for run in runs for finding in _not_finite(run)]
    # The trace of a rank that has failed is shorter, and no step was left out.
    traced = [(run, finding) for run in runs if not run.failed for finding in _traced(run)]
    exact = next((one for title in (DIFFER, LEFT_OUT) for _, one in traced if one.title == title), None)
    said = [(run, _with_the_rates(_with_the_step(finding, exact), run)) for run in runs for finding in _said(run)]
    seen = {finding.code for _, finding in said} | {finding.title for _, finding in said}
    unsaid = [(run, one) for run, one in traced if not {CHECKED.get(one.title), one.title} & seen]
    return (*_once([*not_finite, *said, *unsaid]), *(_lost_time(speed) if speed is not None else ()))


def remarks_of(runs: Sequence[Run], link: Link | None) -> tuple[Finding, ...]:
    """Return what may be meant so: what windows show, what costs time, buffers that each rank keeps.

    Args:
        runs: those that are compared.
        link: how gradients travel; None where it was not measured.
    """
    logged = [(run, finding) for run in runs for finding in _noted(run, "log") if finding.code not in LOGGED]
    looks = (_in_traces, _unstepped, _own_buffers, _parts_of_inputs)
    shown = [(run, finding) for run in runs for look in looks for finding in look(run)]
    counted = [(run, finding) for run in runs for finding in _each_averaged(run, link)]
    return _once([*logged, *shown, *counted])


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
    return Finding(WEIGHTS, exact.title, f"{exact.text} {kind_in(said.text)}".strip(), ())


def _with_the_rates(said: Finding, run: Run) -> Finding:
    """Return what dpfuse has said of learning rates that differ, with that of each rank."""
    from dpfuse.loop.same_rates import REMEDY as RATES_REMEDY  # it imports torch

    for step in range(run.steps if said.code == OTHER_RATES else 0):
        lines = {rank: trace.steps[step] for rank, trace in run.traces.items()}
        rates = {rank: ", ".join(str(group.get("lr")) for group in line["settings"]) for rank, line in lines.items()}
        if len(set(rates.values())) > 1:
            name = run.traces[0].optimizers[lines[0]["optimizer"]]["class"]
            each = ", ".join(f"rank {rank} has {rate}" for rank, rate in [*rates.items()][: 2 * SHOWN])
            more = ", …" if len(rates) > 2 * SHOWN else ""
            text = (
                f"the learning rates of {name} differ between ranks, first in step {step}: {each}{more}. Expected "
                f"equal ones; the weights of the ranks drift apart. {RATES_REMEDY}"
            )
            return replace(said, title="other learning rates", text=text)
    return said


def _once(found: Sequence[tuple[Run, Finding]]) -> tuple[Finding, ...]:
    merged: dict[tuple[str, str], Finding] = {}
    for run, finding in found:
        # With a code, the text may name other steps in each run.
        key = (finding.code, "" if finding.code else finding.text)
        kept = merged.get(key, finding)
        if run.title not in kept.where:
            merged[key] = replace(kept, where=(*kept.where, run.title))
    return tuple(merged.values())


def _not_finite(run: Run) -> Iterator[Finding]:
    """Yield that a step used values that are not finite, or that many steps were skipped for them."""
    found = first_not_finite(run.traces)
    if found is not None:
        yield Finding("", found.title, found.text, (), found.step, found.rank, found.parameter)
    for one in () if run.failed else skipped_of([run]):
        if one.too_many:
            first = first_in_backward(run.traces)
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
    traces = run.traces
    if not traces:
        return
    first = traces[0]
    again = averaged_again(traces)
    if again is not None:
        yield Finding("", TWICE, again.text, (), again.step)
    yield from _same_order(run)
    if first.settings["ranks"] == 1:
        text = "the process group has one rank, so nothing is averaged; start several ranks, or leave the wrapper out"
        yield Finding("", ALONE, text, ())
    left_out = _left_out(run)
    if left_out is not None:
        text = (
            f"{left_out}, expected the same on every rank. From there on the weights of the ranks differ. Is the step "
            "inside a condition on the rank?"
        )
        yield Finding("", LEFT_OUT, text, ())
    for model in first.models:
        unused = _never_used(run, model)
        if unused:
            text = (
                f"{name_list(unused)} of model {model['number']} ({model['class']}) got no gradient on any rank in "
                f"{run.steps} steps{run.of_optimizers}; freeze them, or use them in the loss"
            )
            yield Finding("", "unused parameters", text, ())
    if len(traces) < 2:
        return
    parting = _parting(run)
    if parting is not None:
        step, names, before = parting
        where = f" in {name_list(names)}" if names else ""
        text = (
            f"after step {step} the ranks hold different weights{where}, expected equal ones, since their averaged "
            "gradients are equal"
        )
        if before is not None:
            text += (
                f". They were equal after step {before} and differed when step {step} began, so other code than the "
                "optimizer has written them. Do the same on every rank."
            )
        else:
            text += "; is each wrapped, trained by the same optimizer, and loaded on every rank?"
        yield Finding("", DIFFER, text, ())
    if _same_inputs(run) and _same_gradients(run):
        text = (
            "all ranks got the same inputs in every step, and computed the same gradients from them; give each rank "
            "its own part of the data, such as with torch's DistributedSampler"
        )
        yield Finding("", SAME, text, ())


def _parting(run: Run) -> tuple[int, list[str], int | None] | None:
    """Return the first step after which weights differ that all ranks have stepped by the same averaged gradients.

    Ranks may well train apart for a while: inside of `no_sync()`, or with a hook that averages over some of them. Their
    weights then differ before such a step, too.

    Returns:
        The step, the names of the parameters, as far as they were hashed one by one, and the step before of that
        optimizer if they were equal after it and differed when this one began.
    """
    first = run.traces[0]
    last: dict[int, tuple[int, bool]] = {}  # by optimizer: its last step, and whether the weights differ since then
    for step in range(run.steps):
        lines = [trace.steps[step] for trace in run.traces.values()]
        names = first.optimizers[lines[0]["optimizer"]]["names"]
        if any(trace.optimizers[trace.steps[step]["optimizer"]]["names"] != names for trace in run.traces.values()):
            continue  # each rank steps its own part
        averages = [_averages(line) for line in lines]
        name = "parameters" if "parameters" in lines[0] else "all_parameters"
        before, was_apart = last.get(lines[0]["optimizer"], (None, False))
        differ = len({line[name] for line in lines}) > 1
        last[lines[0]["optimizer"]] = step, differ
        if differ and not was_apart and averages[0] and all(one == averages[0] for one in averages):
            begun_apart = len({line.get(BEFORE_STEP) for line in lines}) > 1
            found = [
                one
                for index, one in enumerate(names)
                if name == "parameters" and len({line[name][8 * index : 8 * index + 8] for line in lines}) > 1
            ]
            return step, found, before if begun_apart else None
    return None


def _left_out(run: Run) -> str | None:
    """Return which rank has made no step where others have, in words; None if all made the same."""
    steps = {rank: len(trace.steps) for rank, trace in run.traces.items()}
    idle = [rank for rank, count in steps.items() if not count]
    if idle:
        return f"rank {idle[0]} makes no step of an optimizer, and others do" if any(steps.values()) else None
    most = max(steps.values())
    for rank, made in steps.items():
        since = run.behind(rank)  # none under join(), where a rank without inputs averages nothing of its own
        if made < most and since:
            more = f"{since} averaged backward{'s' * (since != 1)} without one"
            return f"rank {rank} made {made} of {most} steps of an optimizer, and then {more}"
    for step in range(run.steps):
        counts = {
            rank: sum(bool(one.keys() & {"averaged", "all_averaged"}) for one in trace.steps[step]["backwards"])
            for rank, trace in run.traces.items()
        }
        if len(set(counts.values())) > 1:
            behind = " and ".join(f"{count} on rank {rank}" for rank, count in list(counts.items())[:SHOWN])
            return f"step {step} comes after other numbers of averaged backwards: {behind}"
    return None


def _each_averaged(run: Run, link: Link | None) -> Iterator[Finding]:
    """Yield that several backwards are averaged before each step, where one would do and much time would be saved."""
    steps = run.traces[0].steps if run.traces else []
    for number, optimizer in enumerate(run.traces[0].optimizers if run.traces else []):
        lines = [line for line in steps if line["optimizer"] == number]
        models = {model for line in lines for model in _averages(line)}
        for model in sorted(models):
            lengths = {
                sum(model in one.get("averaged", one.get("all_averaged", {})) for one in line["backwards"])
                for line in lines[1:]  # before the first one, a program may warm up
            }
            count = min(lengths, default=0) if _adds_up(lines[1:], model) else 1
            saved = 0.0 if link is None else link.exposed * (1 - 1 / max(count, 1))
            if len(lengths) == 1 and link is not None and saved > WORTH * link.step:
                text = (
                    f"{count} averaged backwards come before each of {len(lines)} steps of {optimizer['class']}, and "
                    "their gradients are added up. With all but the last inside no_sync(), a step would save up to "
                    f"{1e3 * saved:.3g} of {1e3 * link.step:.3g} ms."
                )
                yield Finding(EACH_AVERAGED, "each backward is averaged", text, ())


def _adds_up(lines: Sequence[dict[str, Any]], model: str) -> bool:
    """Whether each average before a step, but the first, adds to gradients: a closure that zeroes them does not."""
    for line in lines:
        averaged = [one for one in line["backwards"] if model in one.get("averaged", one.get("all_averaged", {}))]
        if not all(any(one.get(HELD, {}).get(model, [1])) for one in averaged[1:]):
            return False
    return True


def _in_traces(run: Run) -> Iterator[Finding]:
    """Yield what is odd about windows, about calls around steps, and about hooks."""
    for code, title, look in LOOKS if run.traces else ():
        seen = look(run.traces)
        if isinstance(seen, Seen):
            yield Finding(code, title, seen.text, (), seen.step)
        elif seen is not None:
            yield Finding(code, title, seen, ())


def _parts_of_inputs(run: Run) -> Iterator[Finding]:
    """Yield that ranks with equal inputs have computed other gradients."""
    if run.traces and _same_inputs(run) and not _same_gradients(run):
        text = (
            "all ranks got the same inputs in every step, and computed other gradients from them. That is right where "
            "each rank takes its part of the inputs in forward, or has other targets. If only dropout differs, give "
            "each rank its own part of the data, such as with torch's DistributedSampler."
        )
        yield Finding(SAME_BATCHES, "the same inputs on every rank", text, ())


def _unstepped(run: Run) -> Iterator[Finding]:
    """Yield that some parameters are in no optimizer. Another one may begin later, so it is no more than a remark."""
    names = unstepped(run.traces) if run.traces else []
    if names:
        text = (
            f"{name_list(names)} got gradients, and in {run.steps} steps{run.of_optimizers} no optimizer has stepped "
            "on them, though one has on others of the model. Expected all of them in an optimizer: pass "
            "model.parameters(), or freeze them."
        )
        yield Finding(NEVER_STEPPED, "parameters that no optimizer has", text, ())


def _same_order(run: Run) -> Iterator[Finding]:
    """Yield that a sampler that shuffles gives the same order in each pass over its data."""
    samplers = [one for facts in run.facts.values() for one in facts["samplers"]]
    repeated = [one["epochs"] for one in samplers if not one["set"] and len(set(one["epochs"])) == 1]
    count = max(map(len, repeated), default=0)
    if count >= PASSES:
        text = (
            f"the training made {count} passes over a DistributedSampler with shuffle=True, and set_epoch() was never "
            "called. The order depends on the epoch, so each pass has the same. Expected another order in each: call "
            "sampler.set_epoch(epoch) before each pass."
        )
        yield Finding(SAME_ORDER, "the same order in each epoch", text, ())


def _own_buffers(run: Run) -> Iterator[Finding]:
    """Yield that buffers differ between ranks after each average: dpfuse has not sent them."""
    for model in run.traces[0].models if run.traces else []:
        number, names = str(model["number"]), model.get("buffers", [])
        rows = [
            [_last(trace.steps[step], MODULE_BUFFERS).get(number) for trace in run.traces.values()]
            for step in range(run.steps)
        ]
        sent = [[texts for texts in row if texts is not None] for row in rows if None not in row]
        apart = [
            name
            for index, name in enumerate(names)
            if len(sent) > 1 and all(len({texts[8 * index : 8 * index + 8] for texts in row}) > 1 for row in sent)
        ]
        if apart:
            text = (
                f"{name_list(apart)} of model {number} ({model['class']}) differ between ranks after each average, so "
                "a checkpoint holds those of the rank that saves it. Leave out broadcast_buffers=False to have rank "
                "0's on all, or let torch.nn.SyncBatchNorm average statistics."
            )
            yield Finding("", BUFFERS, text, ())


def _averages(line: dict[str, Any]) -> dict[str, str]:
    """Return the hashes of the last average of each model in a step; empty if nothing was averaged."""
    return _last(line, "averaged", "all_averaged")


def _last(line: dict[str, Any], *fields: str) -> dict[str, str]:
    """Return what the last backward of each model in a step has in these fields."""
    found: dict[str, str] = {}
    for backward in line["backwards"]:
        for name in fields:
            found |= backward.get(name, {})
    return found


def _never_used(run: Run, model: dict[str, Any]) -> list[str]:
    """Return the parameters of a model that are trained, and that no rank has used in any step."""
    number = str(model["number"])
    of_ranks = [facts["unused"][number] for facts in run.facts.values() if number in facts["unused"]]
    return [name for name in model["names"] if of_ranks and all(name in unused for unused in of_ranks)]


def _same_inputs(run: Run) -> bool:
    """Whether all ranks got the same inputs, and other ones from step to step."""
    seen: set[str] = set()
    count = 0
    for step in range(run.steps):
        rows = [[one["inputs"] for one in trace.steps[step]["forwards"]] for trace in run.traces.values()]
        if any(row != rows[0] for row in rows):
            return False
        seen.update(rows[0])
        count += len(rows[0])
    return count > 1 and len(seen) > 1


def _same_gradients(run: Run) -> bool:
    """Whether all ranks computed the same gradients in one of the steps at least."""
    for step in range(run.steps):
        rows = [[one.get("local") for one in trace.steps[step]["backwards"]] for trace in run.traces.values()]
        if any(rows[0]) and all(row == rows[0] for row in rows):
            return True
    return False
