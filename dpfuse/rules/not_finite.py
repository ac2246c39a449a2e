"""A step is made on NaN or infinite values: where they begin, and how far they go. It has no code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpfuse.rules.seen import Seen, Traces, name_list
from dpfuse.rules.windows import full_name
from dpfuse.trace_file import NOT_FINITE, SKIPPED, STEPPED, WEIGHTS, RankTrace

__all__ = ["TITLE", "find", "first_in_backward"]

TITLE = "not finite"  # begins each of a finding


def find(traces: Traces) -> Seen | None:
    """Tell of the first step whose gradients, weights or last loss are not finite.

    What came before its last backward was left out of it: a `GradScaler`, or the program, has skipped a step. The rank
    is the first on which the loss or the gradient was not finite; none where it was so on all, or on none. The
    parameter is the first whose gradient or weights were not finite; none where it was the loss alone.
    """
    for step, lines in _steps(traces):
        if any(_loss(line) or _places(line, STEPPED) or _places(line, WEIGHTS) for line in lines.values()):
            return _told(traces, step, lines)
    return None


def first_in_backward(traces: Traces) -> str:
    """Say which loss or gradient was not finite first, whether a step was made on it or not; empty if none was."""
    for step, lines in _steps(traces):
        for index in range(max(len(line["backwards"]) for line in lines.values())):
            for rank, line in lines.items():
                for backward in line["backwards"][index : index + 1]:
                    names = _own(traces[rank], backward)
                    if names or _value(backward):
                        what = "the loss" if _value(backward) else f"the gradient of {name_list(names)}"
                        return f"{what} on rank {rank}, before step {step}"
    return ""


def _steps(traces: Traces) -> Iterator[tuple[int, dict[int, dict[str, Any]]]]:
    """Yield the number of each step, and its lines by rank; some ranks may make fewer."""
    for step in range(max((len(trace.steps) for trace in traces.values()), default=0)):
        yield step, {rank: trace.steps[step] for rank, trace in traces.items() if step < len(trace.steps)}


def _told(traces: Traces, step: int, lines: Mapping[int, dict[str, Any]]) -> Seen:
    losses = {rank: loss for rank, line in lines.items() if (loss := _loss(line))}
    first = min(losses or lines)
    optimizer = traces[first].optimizers[lines[first]["optimizer"]]
    # Each rank may step a part of its own.
    names = {rank: traces[rank].optimizers[line["optimizer"]]["names"] for rank, line in lines.items()}
    stepped, weights = (
        list(dict.fromkeys(name for rank, line in lines.items() for name in _at(names[rank], _places(line, field))))
        for field in (STEPPED, WEIGHTS)
    )
    # A gradient that was used may be of any backward before the step; where none was, an earlier one was skipped.
    own = _own_of_ranks(traces, lines, max(len(line["backwards"]) for line in lines.values()) if stepped else 1)
    used = [rank for rank, line in lines.items() if _places(line, STEPPED) or _places(line, WEIGHTS)]
    ranks = sorted(losses or own or used)
    where = _ranks(ranks, len(traces))
    if losses:
        seen = f"in step {step} the loss was {losses[first]} on {where}"
        if stepped:
            seen += f", and {optimizer['class']} stepped on it: the gradient of {name_list(stepped)} was not finite"
    elif own:
        seen = f"in step {step} the gradient of {name_list(own[ranks[0]])} was not finite on {where}"
        seen += f", and {optimizer['class']} stepped on it" if stepped else ""
    elif stepped:
        seen = (
            f"in step {step} {optimizer['class']} stepped on a gradient of {name_list(stepped)} that was not finite on "
            f"{where}, though those that the ranks had computed were finite"
        )
    else:
        seen = (
            f"step {step} of {optimizer['class']} made {name_list(weights)} NaN or infinite on {where}, from gradients "
            "that were finite as far as they can be read"
        )
    parameters = own.get(ranks[0]) or stepped or weights or [""]
    text = (
        f"{seen}. {_end(traces)} Expected finite numbers: with check_finite='raise', a wrapper of dpfuse stops there, "
        "and a torch.amp.GradScaler skips such steps. Where gradients are finite and weights are not, try a smaller "
        "learning rate."
    )
    rank = ranks[0] if len(ranks) < max(len(traces), 2) else None
    title = f"{TITLE} since step {step}, {'on all ranks' if rank is None else f'rank {rank}'}"
    return Seen(title, text, step, rank, parameters[0])


def _own_of_ranks(traces: Traces, lines: Mapping[int, dict[str, Any]], count: int) -> dict[int, list[str]]:
    """Return, by rank, the parameters whose gradient it had not finite, in the latest of the last backwards."""
    for back in range(1, count + 1):
        found = {
            rank: names
            for rank, line in lines.items()
            if len(line["backwards"]) >= back and (names := _own(traces[rank], line["backwards"][-back]))
        }
        if found:
            return found
    return {}


def _end(traces: Traces) -> str:
    """Say what is not finite at the end."""
    last = [trace.steps[-1] for trace in traces.values() if trace.steps]
    losses = [loss for line in last if (loss := _loss(line))]
    # The weights of each optimizer, after its last step. Several optimizers, and several ranks, may have the same ones.
    weights = {
        (rank, line["optimizer"]): _places(line, WEIGHTS) for rank, trace in traces.items() for line in trace.steps
    }
    bad = {
        name
        for (rank, optimizer), places in weights.items()
        for name in _at(traces[rank].optimizers[optimizer]["names"], places)
    }
    count = len({name for trace in traces.values() for one in trace.optimizers for name in one["names"]})
    found = [f"the loss is {losses[0]} on {len(losses)} of {len(traces)} ranks"] if losses else []
    found += [f"{len(bad)} of {count} parameters are not finite"] if bad else []
    return f"At the end {' and '.join(found) or 'loss and weights are finite again'}."


def _ranks(ranks: Sequence[int], count: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "all ranks" if len(ranks) == count else f"ranks {name_list([str(rank) for rank in ranks])}"


def _loss(line: dict[str, Any]) -> str:
    """Return the last loss before a step as a text, such as "nan"; empty if it is finite, or was skipped."""
    skipped = SKIPPED in line.get(NOT_FINITE, {})
    return "" if skipped or not line["backwards"] else _value(line["backwards"][-1])


def _value(backward: dict[str, Any]) -> str:
    value = backward.get("value")
    return "" if value is None or math.isfinite(float(value)) else str(float(value))


def _own(trace: RankTrace, backward: dict[str, Any]) -> list[str]:
    """Return the parameters whose gradient of this rank was not finite in a backward."""
    return [
        full_name(model, name)
        for model, places in backward.get(NOT_FINITE, {}).items()
        for name in _at(trace.models[int(model)]["names"], places)
    ]


def _places(line: dict[str, Any], field: str) -> list[int]:
    found: list[int] = line.get(NOT_FINITE, {}).get(field, [])
    return found


def _at(names: Sequence[str], places: Sequence[int]) -> list[str]:
    """Return the names at these places; a group of an optimizer may have come later than its names were written."""
    return [names[place] for place in places if place < len(names)]
