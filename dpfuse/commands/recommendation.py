"""Which sizes to use: the simplest ones that are as fast as the fastest, within the noise. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dpfuse.commands.contenders import DEFAULT, TUNED, changes
from dpfuse.commands.sweep import Row

__all__ = ["Recommendation", "recommend"]

FEWEST = 5  # rounds that are needed to estimate the noise
LEAST = 0.02  # the part of a step by which two measurements of the same thing often differ
# Three standard errors of a median, which is 1.25 / sqrt(n) standard deviations, each 1.48 median deviations.
SPREADS = 3 * 1.25 * 1.48


@dataclass(frozen=True)
class Recommendation:
    """What a user should write.

    Args:
        name: of the row.
        arguments: of `DataParallel`, after the model; empty if the defaults are kept.
        gain: the part of the default's step that it saves.
        reason: a sentence.
    """

    name: str
    arguments: str
    gain: float
    reason: str


def recommend(rows: Sequence[Row]) -> Recommendation:
    """Return the simplest of dpfuse's rows that is not slower than the fastest by more than noise.

    The default sizes are simpler than one other size; one other size is simpler than two; two are simpler than buckets
    that every job tunes. Turns of the same round are compared, so that drift affects both.

    Args:
        rows: with the default sizes among them.

    Example:
        >>> from dpfuse.commands.recommendation import recommend
        >>> from dpfuse.commands.sweep import Row
        >>> default = Row("25 / 1 MB", (25, 1), 2, ((0.010,), (0.012,), (0.011,)))
        >>> recommend([default, Row("8 / 1 MB", (8, 1), 4, ((0.008,), (0.010,), (0.009,)))]).arguments
        'comm_buffer_size=8'
        >>> recommend([default, Row("5 / 1 MB", (5, 1), 6, ((0.012,), (0.009,), (0.011,)))]).arguments
        ''
    """
    own = [row for row in rows if row.sizes is not None]
    default = next(row for row in own if row.sizes == DEFAULT and row.name != TUNED)
    best = min(own, key=lambda row: row.median)
    chosen = min((row for row in own if _as_fast(row, best)), key=lambda row: (_changes(row), row.median))
    guess = f"; with fewer than {FEWEST} rounds the noise is not known well" if len(default.turns) < FEWEST else ""
    if chosen is default:
        reason = "no other size is faster"
        if best is not default:
            gain, noise = _gain(default, best), _noise(default, best) / default.median
            reason = f"no other size is faster by more than noise ({best.name}: {-gain:+.1%}, noise {noise:.1%})"
            if gain > LEAST:
                reason += "; more --rounds may decide"
        return Recommendation(default.name, "", 0.0, f"keep the default sizes: {reason}{guess}")
    gain = _gain(default, chosen)
    reason = f"a step takes {gain:.1%} less than with the default sizes"
    if chosen is not best:
        reason += f", and {best.name} is not faster by more than noise"
    return Recommendation(chosen.name, _arguments(chosen), gain, reason + guess)


def _as_fast(row: Row, best: Row) -> bool:
    return median(_differences(row, best)) <= _noise(row, best)


def _gain(default: Row, row: Row) -> float:
    return median(_differences(default, row)) / default.median


def _noise(row: Row, best: Row) -> float:
    """Return the seconds by which the two may differ by chance."""
    differences = _differences(row, best)
    typical = median(differences)
    spread = median(abs(one - typical) for one in differences)
    return max(LEAST * best.median, SPREADS * spread / math.sqrt(len(differences)))


def _differences(row: Row, best: Row) -> list[float]:
    return [own - others for own, others in zip(row.turns, best.turns, strict=True)]


def _changes(row: Row) -> int:
    """Return how much a user has to write, as a number to compare."""
    assert row.sizes is not None
    return 3 if row.name == TUNED else changes(row.sizes)


def _arguments(row: Row) -> str:
    if row.name == TUNED:
        return 'plan="auto"'
    assert row.sizes is not None
    names = ("comm_buffer_size", "last_comm_buffer_size")
    return ", ".join(
        f"{name}={_literal(size)}" for name, size, usual in zip(names, row.sizes, DEFAULT, strict=True) if size != usual
    )


def _literal(size: float) -> str:
    return f"{size:g}" if size < float("inf") else 'float("inf")'
