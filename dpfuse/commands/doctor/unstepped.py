"""Which parameters get gradients while optimizers step on other ones only. Reads traces only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpfuse.commands.doctor.cut_windows import full_name
from dpfuse.trace.trace_file import ABSENT, RankTrace

__all__ = ["unstepped"]

WIDTH = len(ABSENT)  # characters of a hash
SHORT = {"torch.float16", "torch.bfloat16"}


def unstepped(traces: Mapping[int, RankTrace]) -> list[str]:
    """Return the parameters with gradients that are in no optimizer, of models of which one has stepped on a part.

    Where optimizers have none of a model, they step on copies, or the model is trained later. Each rank may have the
    optimizer of its own part. A parameter whose weights change is stepped under another name, or by other code, and one
    of 16 bits may have a copy that is stepped.

    Args:
        traces: of a run, by rank.
    """
    stepped = {name for trace in traces.values() for one in trace.optimizers for name in one["names"]}
    found: list[str] = []
    for model in traces[0].models:
        number = str(model["number"])
        averages = _texts(traces[0], "backwards", "averaged", number)
        weights = _texts(traces[0], "forwards", "weights", number)
        names = {
            place: full_name(number, name)
            for place, name in enumerate(model["names"])
            if _values(averages, place) - {ABSENT}
        }
        if stepped.isdisjoint(names.values()):
            continue
        for place, name in names.items():
            is_short = not SHORT.isdisjoint(model.get("dtypes", [])[place : place + 1])
            if not (name in stepped or is_short or len(_values(weights, place)) > 1):
                found.append(name)
    return found


def _texts(trace: RankTrace, kind: str, field: str, model: str) -> list[str]:
    """Return the hashes of a model's parameters in each forward or backward that has them."""
    lines = (one.get(field, {}) for line in trace.steps for one in line[kind])
    return [one[model] for one in lines if model in one]


def _values(texts: Sequence[str], place: int) -> set[str]:
    """Return the hashes of one parameter."""
    return {text[WIDTH * place : WIDTH * (place + 1)] for text in texts}
