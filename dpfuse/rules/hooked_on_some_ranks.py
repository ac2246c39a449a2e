"""Hooks of the program change gradients on some ranks alone, before they are averaged. It has no code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpfuse.rules.seen import Seen, Traces, name_list
from dpfuse.trace_file import ABSENT, HOOKED, RankTrace, hashes_in

__all__ = ["find"]

ALWAYS = 3  # gradients of a rank, all of which are changed: no hook that cuts only what is large
Hashes = tuple[str, str]  # of a gradient as it was computed, and after hooks of the program


def find(traces: Traces) -> Seen | None:
    """Say that it is so; only steps that are hashed in full show it."""
    for model in traces[0].models:
        rows = {rank: _gradients(trace, str(model["number"])) for rank, trace in traces.items()}
        names: dict[tuple[int, ...], list[str]] = {}  # by the ranks that change their gradients
        for place, name in enumerate(model["names"]):
            columns = {rank: [row[place] for row in each if row[place][0] != ABSENT] for rank, each in rows.items()}
            if ranks := _alone(columns):
                names.setdefault(ranks, []).append(name)
        for ranks, found in names.items():
            return Seen(
                "gradients are changed on some ranks",
                f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} alone, hooks of the program change "
                f"gradients before they are averaged: those of {name_list(found)} of model {model['number']} "
                f"({model['class']}). So changed and unchanged gradients are averaged. Expected the same on every "
                "rank: is the hook, or what it does, inside a condition on the rank?",
            )
    return None


def _gradients(trace: RankTrace, model: str) -> list[list[Hashes]]:
    """Return, for each backward that reached a model, the hashes of the gradient of each parameter."""
    rows = []
    for backward in (one for line in trace.steps for one in line["backwards"]):
        if model in backward.get("local", {}):
            computed, hooked = hashes_in(backward["local"][model]), backward.get(HOOKED, {}).get(model)
            rows.append([*zip(computed, hashes_in(hooked or ABSENT * len(computed)), strict=True)])
    return rows


def _alone(columns: Mapping[int, Sequence[Hashes]]) -> tuple[int, ...]:
    """Return the ranks whose hooks change the gradient of a parameter, where hooks of other ranks do not.

    A hook may change a gradient only where it has to, as one that cuts large values. So where another rank has hooks,
    too, it counts only if all gradients of these ranks are changed.
    """
    changed = {rank: [hooked not in (ABSENT, computed) for computed, hooked in each] for rank, each in columns.items()}
    ranks = tuple(rank for rank, each in changed.items() if any(each))
    others = [rank for rank, each in changed.items() if each and rank not in ranks]
    have_hooks = any(hooked != ABSENT for rank in others for _, hooked in columns[rank])
    always = all(len(changed[rank]) >= ALWAYS and all(changed[rank]) for rank in ranks)
    return ranks if others and (always or not have_hooks) else ()
