"""Draws the diagrams of the tutorials: python docs/images/draw_step.py. Needs matplotlib; measures nothing.

The lengths of the boxes are chosen so that one sees the order of what happens. They are no times.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

IMAGES = Path(__file__).parent
COMPUTE, PACK, SEND, EXPOSED, DELIVER = "0.85", "tab:orange", "tab:blue", "tab:red", "tab:green"


def box(axis: Axes, row: float, begin: float, end: float, colour: str, text: str) -> None:
    """Draw one box of a row, with its text inside."""
    axis.barh(row, end - begin, left=begin, height=0.62, color=colour, edgecolor="white")
    dark = colour in (SEND, EXPOSED, DELIVER)
    axis.text((begin + end) / 2, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")


def save(figure: Figure, name: str) -> None:
    """Write the picture without a date, so that each run writes the same bytes."""
    figure.savefig(IMAGES / name, dpi=100, metadata={"Software": None})


def step() -> None:
    """Draw one step with three buckets: what computes, what packs and what travels."""
    figure = Figure(figsize=(9.5, 2.9), layout="constrained")
    axis = figure.subplots()
    box(axis, 0, 0, 3, COMPUTE, "forward")
    box(axis, 0, 3, 5, COMPUTE, "backward\nlayers 6, 5")
    box(axis, 0, 5.2, 8, COMPUTE, "backward\nlayers 4, 3, 2")
    box(axis, 0, 8.2, 10, COMPUTE, "layer 1")
    for begin in (5, 8, 10):
        box(axis, 0, begin, begin + 0.2, PACK, "")
    box(axis, 0, 10.9, 11.2, DELIVER, "")
    box(axis, 0, 11.2, 12.4, COMPUTE, "optimizer")
    box(axis, 1, 5.2, 7, SEND, "bucket 0")
    box(axis, 1, 8.2, 10, SEND, "bucket 1")
    box(axis, 1, 10.2, 10.9, EXPOSED, "2")
    axis.axvline(10, color="black", linewidth=1, linestyle="--")
    axis.text(9.95, -0.5, "backward has computed the last gradient", ha="right", va="bottom", fontsize=8)
    for x, text, colour in [
        (0, "pack: copy, scale, cast", PACK),
        (3.4, "all-reduce, hidden", SEND),
        (6.2, "all-reduce, exposed: the rank waits", EXPOSED),
        (10.2, "deliver .grad", DELIVER),
    ]:
        axis.barh(1.85, 0.25, left=x, height=0.25, color=colour)
        axis.text(x + 0.35, 1.85, text, va="center", fontsize=8)
    axis.set_yticks([0, 1], ["this rank", "network"])
    axis.set_xticks([])
    axis.set_xlim(0, 12.6)
    axis.set_ylim(2.1, -0.75)
    axis.set_xlabel("time")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    save(figure, "step.png")


def accumulation() -> None:
    """Draw a window of three micro-batches: two local backwards, and one that synchronises."""
    figure = Figure(figsize=(9.5, 2.0), layout="constrained")
    axis = figure.subplots()
    for number in range(3):
        begin = 3 * number
        box(axis, 0, begin, begin + 1.1, COMPUTE, "forward")
        text = "backward\nin no_sync()" if number < 2 else "backward,\nsynchronised"
        box(axis, 0, begin + 1.1, begin + 3, COMPUTE, text)
    box(axis, 1, 7.6, 8.9, SEND, "buckets")
    box(axis, 1, 9.0, 9.6, EXPOSED, "last")
    box(axis, 0, 9.6, 10.8, COMPUTE, "optimizer")
    axis.set_yticks([0, 1], ["this rank", "network"])
    axis.set_xticks([])
    axis.set_ylim(1.5, -0.5)
    axis.set_xlabel("time")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    save(figure, "accumulation.png")


def machines() -> None:
    """Draw two machines, their launchers and ranks, and the three kinds of connection between them."""
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    axis = figure.subplots()
    axis.axis("off")
    axis.set_xlim(0, 12)
    axis.set_ylim(0, 4.2)
    edges = {"boxstyle": "round,pad=0.4", "ec": "0.4"}
    for number, left in enumerate((0.3, 7.3)):
        axis.add_patch(FancyBboxPatch((left, 0.1), 4.4, 3.9, boxstyle="round,pad=0.05", fc="0.97", ec="0.7"))
        axis.text(left + 2.2, 3.75, f"machine {number}", ha="center", va="center", fontsize=10)
        axis.text(left + 2.2, 2.95, "dpfuse.launch", ha="center", va="center", fontsize=9, bbox={**edges, "fc": "0.9"})
        for local in range(2):
            x = left + 1.1 + 2.2 * local
            white = {**edges, "fc": "white"}
            axis.text(x, 1.0, f"rank {2 * number + local}", ha="center", va="center", fontsize=9, bbox=white)
            axis.annotate("", (x, 1.4), (left + 2.2, 2.6), arrowprops={"arrowstyle": "->", "color": "0.5"})
    for y, text, colour in [
        (2.95, "rendezvous: --master", "0.4"),
        (1.35, "heartbeats", EXPOSED),
        (0.75, "gradients: NCCL or gloo", SEND),
    ]:
        axis.annotate("", (7.25, y), (4.75, y), arrowprops={"arrowstyle": "<->", "color": colour})
        axis.text(6.0, y + 0.1, text, ha="center", va="bottom", fontsize=8, color=colour)
    save(figure, "machines.png")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    step()
    accumulation()
    machines()
