"""`dpfuse bench`: the table, the recommendation and the JSON of a sweep."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from dpfuse.commands.contenders import DEFAULT, TUNED, Sizes
from dpfuse.commands.ranks import reports_here, run_on_ranks
from dpfuse.commands.recommendation import recommend
from dpfuse.commands.report_file import buckets_of, size_of, write_report
from dpfuse.commands.report_folder import REPORT, make_folder
from dpfuse.commands.sweep import Effort, Row, Sweep, sweep
from dpfuse.commands.user_model import find_factory
from dpfuse.tune.simulation import table_text

__all__ = ["Effort", "bench"]


def bench(
    place: str,
    count: int | None,
    grid: list[Sizes],
    effort: Effort,
    folder: Path,
    arguments: list[str],
    *,
    find_unused: bool,
) -> int:
    """Measure, print and write.

    Args:
        place: `module:factory`.
        count: ranks to start; None takes the default.
        grid: sizes to try in addition to the default.
        effort: the number of rounds and steps.
        folder: for the report.
        arguments: of the command line.
        find_unused: torch's `find_unused_parameters`.

    Raises:
        DPFuseError: nothing could be measured, or a contender does not average.
    """
    find_factory(place)  # before ranks start: an error is shorter here
    if reports_here():
        make_folder(folder)
    found: Sweep | None = run_on_ranks(partial(sweep, find_unused=find_unused), (place, grid, effort), count)
    if found is not None:
        _report(found, place, folder, arguments)
    return 0


def _report(found: Sweep, place: str, folder: Path, arguments: list[str]) -> None:
    chosen = recommend(found.rows)
    print(f"{table(found.rows)}\n\n{chosen.reason}")
    if chosen.arguments:
        print(f"recommended: DataParallel(model, {chosen.arguments})")
    rows = [
        {
            "name": row.name,
            "comm_buffer_size": None if row.sizes is None or row.name == TUNED else size_of(row.sizes[0]),
            "last_comm_buffer_size": None if row.sizes is None or row.name == TUNED else size_of(row.sizes[1]),
            "buckets": row.buckets,
            "median": row.median,
            "seconds": row.seconds,
        }
        for row in found.rows
    ]
    facts = {"recommended": asdict(chosen), "rows": rows, "tuned": buckets_of(found.plan)}
    write_report(folder / REPORT, "bench", arguments, place, found.run, facts)
    print(f"report: {folder / REPORT}")


def table(rows: tuple[Row, ...]) -> str:
    """Return the rows as a text, the fastest first; times in ms."""
    default = next(row for row in rows if row.sizes == DEFAULT and row.name != TUNED)
    lines: list[tuple[str, ...]] = [("sizes", "buckets", "step", "turns from", "to", "over default")]
    for row in sorted(rows, key=lambda row: row.median):
        lines.append((
            f"{row.name} (default)" if row is default else row.name,
            "" if row.buckets is None else str(row.buckets),
            *(f"{second * 1e3:.3f}" for second in (row.median, min(row.turns), max(row.turns))),
            "" if row is default else f"{row.median / default.median - 1:+.1%}",
        ))  # fmt: skip
    return table_text(lines)
