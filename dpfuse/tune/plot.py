"""Draws a schedule. The only file of this folder that needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from dpfuse.engine.plan import MB
from dpfuse.tune.simulation import Schedule

__all__ = ["save_plot"]

COLOURS = {"filling": "0.85", "ready, not sent": "gold", "all-reduce": "tab:blue", "exposed": "tab:red"}
NAMED = 40  # with more buckets there is no room for parameters' names


def save_plot(schedule: Schedule, path: str | Path, *, title: str = "") -> None:
    """Write a picture with a row per bucket: filling, waiting, all-reduce, and the exposed part of the all-reduce.

    Args:
        schedule: simulated or recorded.
        path: the suffix sets the format, such as `.png`.
        title: above the picture.

    Raises:
        ImportError: Matplotlib is not installed.

    Example:
        >>> import pathlib, tempfile, dpfuse
        >>> from dpfuse.tune import CostTable, Timeline, optimal_plan, save_plot, simulate
        >>> timeline = Timeline.synthetic([dpfuse.ParamSpec("a", (10**6,), "float32")], 0.004)
        >>> cost = CostTable.affine(1e-4, 4e9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "plan.png")
        ...     save_plot(simulate(timeline, optimal_plan(timeline, cost), cost), path)
        ...     path.read_bytes()[1:4]
        b'PNG'
    """
    try:
        from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a display
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(
            "save_plot needs matplotlib, which is not installed: pip install 'dpfuse[bench]', or use save_trace"
        ) from error
    rows = len(schedule.buckets)
    figure = Figure(figsize=(12, 1.6 + min(0.3 * rows, 12.0)), layout="constrained")
    axis = figure.subplots()
    for bucket in schedule.buckets:
        split = max(bucket.sent, bucket.landed - bucket.exposed)
        times = [bucket.opened, bucket.ready, bucket.sent, split, bucket.landed]
        for begin, end, colour in zip(times, times[1:], COLOURS.values(), strict=False):
            axis.barh(bucket.order, max(0.0, end - begin) * 1e3, left=begin * 1e3, height=0.8, color=colour)
        if rows <= NAMED:
            axis.annotate(
                f"{bucket.nbytes / MB:.3g} MB, closed by {bucket.closed_by}",
                (bucket.landed * 1e3, bucket.order),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
    axis.axvline(schedule.backward_end * 1e3, color="black", linewidth=1)
    axis.set_xlim(0, schedule.end * 1e3 * (1.35 if rows <= NAMED else 1.02))
    axis.invert_yaxis()
    axis.set_xlabel("ms since backward began; the line is its end")
    axis.set_ylabel("bucket")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title(f"{title + ': ' if title else ''}{schedule.exposed * 1e3:.3f} ms exposed")
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=110)
