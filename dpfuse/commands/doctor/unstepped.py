"""Which parameters get gradients while optimizers step on other ones only. Reads traces only."""

from __future__ import annotations

from collections.abc import Mapping

from dpfuse.trace.trace_file import ABSENT, RankTrace

__all__ = ["unstepped"]

WIDTH = len(ABSENT)  # characters of a hash


def unstepped(traces: Mapping[int, RankTrace]) -> list[str]:
    """Return the parameters with gradients that are in no optimizer, of models of which one has stepped on a part.

    Where optimizers have none of a model, they step on copies, or the model is trained later. Each rank may have the
    optimizer of its own part.

    Args:
        traces: of a run, by rank.
    """
    stepped = {name for trace in traces.values() for one in trace.optimizers for name in one["names"]}
    found: list[str] = []
    for model in traces[0].models:
        number = str(model["number"])
        texts = [
            one["averaged"][number]
            for line in traces[0].steps
            for one in line["backwards"]
            if number in one.get("averaged", {})
        ]
        names = [
            f"{number}:{name}" if model["number"] else name
            for place, name in enumerate(model["names"])
            if any(text[WIDTH * place : WIDTH * (place + 1)] != ABSENT for text in texts)
        ]
        if not stepped.isdisjoint(names):
            found += [name for name in names if name not in stepped]
    return found
