"""What traces show of calls around steps: gradients that are zeroed never or too often, clipping, schedules.

Only traces of the doctor have calls. What came before the first step of an optimizer is not looked at: the calls do not
name it there. This file knows no run and no finding, only traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpfuse.commands.doctor.cut_windows import class_of, pairs_of, parts_of, reaches, repeats
from dpfuse.trace.trace_file import CALLS, HELD, RANKS, Call, RankTrace

__all__ = ["AGAIN", "CLIPPED", "STEPS", "ZEROED", "Seen", "averaged_again", "clipped_while_scaled", "never_zeroed",
           "schedule_per_batch", "zeroed_in_windows"]  # fmt: skip

STEPS = 8  # in a row, that show a habit
ZEROED = 4  # in a row: windows in which as many backwards are lost
CLIPPED = 2  # windows
AGAIN = 4  # in a row: steps before which gradients are averaged twice
FIELDS = ("forwards", "backwards", CALLS)


@dataclass(frozen=True)
class Seen:
    """What one look has seen.

    Args:
        text: what it is, what was expected, and what to do.
        step: the first one.
    """

    text: str
    step: int


@dataclass(frozen=True)
class _Turn:
    """What came since the step before of one optimizer, up to its next one.

    Args:
        step: the number of its line.
        forwards, backwards, calls: in the order in which they came.
    """

    step: int
    forwards: Sequence[dict[str, Any]]
    backwards: Sequence[dict[str, Any]]
    calls: Sequence[dict[str, Any]]


def never_zeroed(traces: Mapping[int, RankTrace]) -> Seen | None:
    """Say that each backward adds to gradients that a step has used, and that nothing has changed since then.

    Args:
        traces: of a run, by rank.
    """
    first = traces[0]
    for optimizer, model in pairs_of(first):
        row: list[_Turn] = []
        for turn in _turns(first, optimizer):
            row = [*row, turn] if _adds_to_old(turn, optimizer, model) else []
            if len(row) == STEPS:
                return Seen(
                    f"{class_of(first, optimizer)} made {STEPS} steps in a row, from step {row[0].step} to {turn.step} "
                    f"({_line_of(turn.calls, Call.STEP)}), and nothing zeroed its gradients in between. So each "
                    "step used the sum of all batches before it. Expected the gradients of new batches only: call "
                    "optimizer.zero_grad() once for each step. A running sum may be meant so.",
                    row[0].step,
                )
    return None


def zeroed_in_windows(traces: Mapping[int, RankTrace]) -> Seen | None:
    """Say that gradients are zeroed between the backwards of one window, so that those before are lost.

    A program may use such gradients: for a point ahead of the weights, for an attack on the inputs, or it keeps them.
    Such ones have other weights, backwards at other lines, or write gradients before the step.

    Args:
        traces: of a run, by rank.
    """
    first = traces[0]
    if len(first.optimizers) > 1:  # each may zero what the loss of another one has written
        return None
    for optimizer, model in pairs_of(first):
        turns = [*_turns(first, optimizer)]
        if any(_has_other_weights(turn, model) for turn in turns):
            continue
        row: list[_Turn] = []
        before = 0
        for turn in turns:
            zero = _zero_inside(turn.calls, optimizer)
            is_new = not repeats(first.steps[turn.step - 1 : turn.step + 1], model)
            lost = _lost(turn, model) if zero is not None and is_new else 0
            row = [*(row if lost == before else []), turn] if lost else []
            before = lost
            if zero is not None and len(row) == ZEROED:
                return Seen(
                    f"in each of the steps {row[0].step} to {turn.step} of {class_of(first, optimizer)}, gradients "
                    f"were zeroed ({zero['at']}) after {lost} of {len(turn.backwards)} backwards. So these batches "
                    "changed no weight. Expected one call of zero_grad() for each step: move it directly after "
                    "optimizer.step(). Gradients that are only looked at may be meant so.",
                    row[0].step,
                )
    return None


def clipped_while_scaled(traces: Mapping[int, RankTrace]) -> Seen | None:
    """Say that gradients are clipped before a `GradScaler` has unscaled them.

    Args:
        traces: of a run, by rank.
    """
    first = traces[0]
    steps: dict[int, list[int]] = {}
    for number, line in enumerate(first.steps):
        for optimizer, clip in _scaled_clips(line.get(CALLS, [])).items():
            steps.setdefault(optimizer, []).append(number)
            if len(steps[optimizer]) == CLIPPED:
                return Seen(
                    f"before steps {' and '.join(map(str, steps[optimizer]))}, gradients of "
                    f"{class_of(first, optimizer)} were clipped ({clip['at']}) while a GradScaler had them scaled. So "
                    "the limit was compared with gradients times the scale. Expected unscaled ones: call "
                    "scaler.unscale_(optimizer) directly before clipping. A limit times the scale may be meant so.",
                    steps[optimizer][0],
                )
    return None


def schedule_per_batch(traces: Mapping[int, RankTrace]) -> Seen | None:
    """Say that a schedule is stepped after each of several backwards before one step.

    Args:
        traces: of a run, by rank.
    """
    first = traces[0]
    if len(first.optimizers) > 1:  # a schedule may count the steps of another one
        return None
    row: list[_Turn] = []
    is_stepped = True  # since the backward before, of which nothing is known in front of the first turn
    for turn in _turns(first, 0):
        count, each, line = 0, True, ""
        for call in turn.calls:
            if call["what"] == Call.BACKWARD:
                count, each, is_stepped = count + 1, each and is_stepped, False
            elif call["what"] == Call.SCHEDULE and 0 in call["of"]:
                is_stepped, line = True, call["at"]
        row = [*row, turn] if count > 1 and each and not _is_skipped(turn.calls) else []
        if len(row) == STEPS:
            return Seen(
                f"in each of the steps {row[0].step} to {turn.step} of {class_of(first, 0)}, a schedule was stepped "
                f"({line}) after each of {count} backwards. So it makes {count} steps for each step of the "
                "optimizer, and ends early. Expected one step of both: call scheduler.step() directly after "
                "optimizer.step(). A schedule that counts batches may be meant so.",
                row[0].step,
            )
    return None


def averaged_again(traces: Mapping[int, RankTrace]) -> Seen | None:
    """Say that the program takes the mean over the ranks by hand, of gradients that a backward has averaged.

    Args:
        traces: of a run, by rank.
    """
    first = traces[0]
    for optimizer, model in pairs_of(first):
        if first.models[int(model)].get(RANKS) != first.settings["ranks"]:
            continue  # the wrapper averages over some ranks, and the program may do the rest
        row: list[int] = []
        for turn in _turns(first, optimizer):
            own = [one for one in turn.backwards if reaches(one, model)]
            kinds = [call["what"] if optimizer in call["of"] else "" for call in turn.calls]
            last = _last_backward([call["what"] for call in turn.calls])
            is_averaged = bool(own) and any(model in own[-1].get(name, {}) for name in ("averaged", "all_averaged"))
            row = [*row, turn.step] if is_averaged and Call.MEAN in kinds[last:] else []
            if len(row) == AGAIN:
                line = turn.calls[last + kinds[last:].index(Call.MEAN)]["at"]
                return Seen(
                    f"before each of the steps {row[0]} to {row[-1]} of {class_of(first, optimizer)}, the program "
                    f"takes the mean or the sum of gradients over all ranks ({line}), and the backward had averaged "
                    "them already. A mean leaves them what they were, and they travel twice. A sum makes them as many "
                    "times too large as there are ranks. Expected one mean: remove that call, and a division beside "
                    "it.",
                    row[0],
                )
    return None


def _turns(trace: RankTrace, optimizer: int) -> Iterator[_Turn]:
    """Yield what came before each step of an optimizer but the first."""
    since: list[dict[str, Any]] = []
    is_known = False
    for number, line in enumerate(trace.steps):
        since.append(line)
        if line["optimizer"] == optimizer:
            if is_known:
                parts = ([one for each in since for one in each.get(name, [])] for name in FIELDS)
                yield _Turn(number, *parts)
            is_known, since = True, []


def _adds_to_old(turn: _Turn, optimizer: int, model: str) -> bool:
    """Whether the backwards of a turn add to the gradients of the step before, which nothing has changed."""
    own = [one for one in turn.backwards if reaches(one, model)]
    held = own[0][HELD][model] if own else []
    kinds = [call["what"] for call in turn.calls if call["what"] == Call.BACKWARD or optimizer in call["of"]]
    is_changed = Call.ZERO in kinds or Call.BY_HAND in kinds[: _last_backward(kinds)]
    return any(held) and len(parts_of(own, model)) == 1 and Call.STEP in kinds and not is_changed


def _zero_inside(calls: Sequence[dict[str, Any]], optimizer: int) -> dict[str, Any] | None:
    """Return the last call that zeroes all gradients of an optimizer between two backwards of the same line.

    There is none where the step uses other gradients than those of the last backwards.
    """
    kinds = [call["what"] for call in calls]
    last = _last_backward(kinds)
    after = [call["what"] for call in calls[last:] if optimizer in call["of"]]
    if _is_skipped(calls) or Call.STEP in kinds[:last] or Call.BY_HAND in after:
        return None
    found, line = None, ""  # of the backward before
    for place, call in enumerate(calls[: last + 1]):
        if call["what"] == Call.BACKWARD:
            line = call["at"]
        elif call["what"] == Call.ZERO and optimizer in call["whole"] and line:
            following = calls[place + kinds[place:].index(Call.BACKWARD)]
            found = call if following["at"] == line else None
    return found


def _is_skipped(calls: Sequence[dict[str, Any]]) -> bool:
    """Whether a scaler was to make a step before the last backward: these are two windows."""
    kinds = [call["what"] for call in calls]
    return Call.UNSCALE in kinds[: _last_backward(kinds)]


def _last_backward(kinds: Sequence[str]) -> int:
    return max((place for place, kind in enumerate(kinds) if kind == Call.BACKWARD), default=0)


def _lost(turn: _Turn, model: str) -> int:
    """Return how many backwards of a model were zeroed before the step."""
    *lost, _ = parts_of([one for one in turn.backwards if reaches(one, model)], model) or [[]]
    return sum(map(len, lost))


def _has_other_weights(turn: _Turn, model: str) -> bool:
    """Whether the weights change between the forwards of one step."""
    return len({one["weights"][model] for one in turn.forwards if model in one.get("weights", {})}) > 1


def _scaled_clips(calls: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return, by optimizer, a call that clips gradients which are unscaled afterwards."""
    found: dict[int, dict[str, Any]] = {}
    clips: dict[int, dict[str, Any]] = {}  # of gradients that are scaled, since the last backward
    unscaled: set[int] = set()
    is_scaled = False
    for call in calls:
        what = call["what"]
        if what == Call.BACKWARD:
            clips, unscaled = {}, set()
        elif what in (Call.SCALE, Call.GET_SCALE):
            is_scaled = what == Call.SCALE  # the limit may be computed from a scale that was read
        elif what == Call.CLIP and is_scaled:
            clips |= {optimizer: call for optimizer in call["of"] if optimizer not in unscaled}
        elif what == Call.UNSCALE:
            found |= {optimizer: clip for optimizer, clip in clips.items() if optimizer in call["of"]}
            unscaled |= {*call["of"]}
    return found


def _line_of(calls: Sequence[dict[str, Any]], what: Call) -> str:
    return next(str(call["at"]) for call in reversed(calls) if call["what"] == what)
