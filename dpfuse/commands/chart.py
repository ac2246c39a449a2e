"""The picture of a sweep. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from dpfuse.commands.contenders import TUNED
from dpfuse.commands.sweep import Row, Sweep

__all__ = ["save_chart"]

COLOURS = ("0.75", "0.5", "black", "tab:red")  # of contenders without a size


def save_chart(found: Sweep, path: Path, *, title: str) -> None:
    """Write a picture: the time of a step over `comm_buffer_size`, one line per `last_comm_buffer_size`.

    Contenders without these sizes are horizontal lines.

    Args:
        found: the measurements.
        path: its suffix chooses the format.
        title: above the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and needs a display

    figure = Figure(figsize=(10, 6), layout="constrained")
    axis = figure.subplots()
    grid = [row for row in found.rows if row.sizes is not None and row.name != TUNED]
    sizes = [row.sizes for row in grid if row.sizes is not None]
    places = {comm: place for place, comm in enumerate(sorted({comm for comm, _ in sizes}))}
    for last in sorted({last for _, last in sizes}):
        rows = sorted((places[row.sizes[0]], row) for row in grid if row.sizes is not None and row.sizes[1] == last)
        axis.errorbar(
            [place for place, _ in rows],
            [row.median * 1e3 for _, row in rows],
            yerr=list(zip(*(_errors(row) for _, row in rows), strict=True)),
            marker="o",
            capsize=4,
            label=f"dpfuse, last_comm_buffer_size {last:g}",
        )
    others = [row for row in found.rows if row not in grid]
    for row, colour in zip(others, COLOURS, strict=False):
        axis.axhline(row.median * 1e3, color=colour, linestyle="--", label=row.name)
    axis.set_xticks(list(places.values()), [f"{comm:g}" for comm in places])
    axis.set_xlabel("comm_buffer_size, MB; bars cover half of the turns")
    axis.set_ylabel("step, ms (median)")
    axis.set_ylim(bottom=0)
    axis.set_title(f"{title}, {found.run.ranks} ranks")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _errors(row: Row) -> tuple[float, float]:
    """Return the distances from the median to the lower and the upper quartile of the turns, in ms."""
    turns = sorted(row.turns)
    low, high = turns[len(turns) // 4], turns[-1 - len(turns) // 4]
    return max(0.0, row.median - low) * 1e3, max(0.0, high - row.median) * 1e3
