"""Plots a record as one picture with a panel per suite. `python -m bench.plot RECORD PICTURE` plots one again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

__all__ = ["main", "plot_record"]

Row = Mapping[str, Any]
Cases = dict[str, dict[str, Row]]  # measurement by case and contender

PEER = "DDP default"
STEP_COLOURS = {
    "bare again": "0.75",
    "dpfuse views": "tab:green",
    "dpfuse private": "yellowgreen",
    "DDP default": "tab:red",
    "DDP view": "tab:orange",
    "DDP batched": "tab:purple",
    "DDP view + batched": "tab:blue",
    "FSDP2 replicate": "tab:brown",
    "FSDP2 sharded, gathered once": "rosybrown",
    "DeepSpeed stage 0": "tab:pink",
    "DeepSpeed stage 1": "pink",
    "sketch": "0.5",
}
OVERLAP_COLOURS = {
    "dpfuse planned": "tab:green",
    "dpfuse views": "yellowgreen",
    "DDP view": "tab:orange",
    "DDP default": "tab:red",
    "DDP view + batched": "tab:blue",
    "FSDP2 replicate": "tab:brown",
    "Horovod's rule": "tab:olive",
    "DeepSpeed's rule": "tab:pink",
}
WIRE_COLOURS = {
    "DDP view": "tab:red",
    "DDP bf16 hook": "tab:orange",
    "DDP fp16 hook": "gold",
    "DDP PowerSGD": "tab:brown",
    "dpfuse float32": "tab:blue",
    "dpfuse bf16": "tab:green",
    "dpfuse bf16, fp32 sum": "yellowgreen",
    "dpfuse bf16 + feedback": "tab:olive",
    "dpfuse e4m3": "tab:purple",
    "dpfuse e4m3 + feedback": "plum",
}
HEALTH_COLOURS = {
    "dpfuse": "tab:green",
    "dpfuse, below the limit": "yellowgreen",
    "dpfuse scaler": "tab:blue",
    "torch clip + unscale": "tab:red",
}
SHARDED_COLOURS = {
    "DDP views": "tab:orange",
    "DDP with ZeroRedundancyOptimizer": "tab:blue",
    "FSDP2 sharded, gathered once": "rosybrown",
    "DeepSpeed stage 1": "pink",
    "dpfuse": "0.75",
    "dpfuse sharded": "tab:green",
    "dpfuse sharded, stepped in backward": "tab:olive",
    "dpfuse sharded, weights in use elsewhere": "tab:cyan",
}
PACK_COLOURS = {
    "dpfuse": "tab:green",
    "_foreach_copy_ + mul_": "tab:blue",
    "cat(out=) + mul_": "tab:orange",
    "n x mul(out=)": "tab:red",
    "copy_ of the same bytes": "0.75",
}


def plot_record(record: Mapping[str, Any], path: Path, only: Collection[str] = ()) -> None:
    """Draw `record`, or `only` some of its suites, as a PNG file."""
    suites: dict[str, Cases] = {}
    for row in record["measurements"]:
        suites.setdefault(row["suite"], {}).setdefault(row["case"], {})[row["variant"]] = row
    panels = [(suite, draw) for suite, draw in PANELS.items() if suite in suites and (not only or suite in only)]
    figure, axes = plt.subplots(
        max(1, len(panels)), 1, figsize=(12, 5 * max(1, len(panels))), layout="constrained", squeeze=False
    )
    for (suite, draw), (axis,) in zip(panels, axes, strict=False):
        draw(axis, suites[suite])
    machine = record["machine"]
    commit = (machine["commit"] or "no commit")[:10]
    quick = ", quick run" if record["quick"] else ""
    figure.suptitle(f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {commit}, {record['date']}{quick}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_steps(axis: Axes, cases: Cases) -> None:
    # Inside no_sync() every wrapper adds almost nothing, so its ratio would be noise.
    shown = {
        case: rows
        for case, rows in cases.items()
        if not case.startswith("no_sync") and PEER in rows and rows[PEER]["info"]["extra"] > 0
    }
    colours = {name: colour for name, colour in STEP_COLOURS.items() if any(name in rows for rows in shown.values())}

    def relative(rows: dict[str, Row], name: str) -> float:
        return float(rows[name]["info"]["extra"] / rows[PEER]["info"]["extra"]) if name in rows else 0.0

    _draw_bars(axis, shown, colours, relative)
    axis.axhline(1, color="tab:red", linewidth=0.8)
    axis.set_ylabel(f"time over the bare module\n({PEER} = 1; lower is better)")
    axis.set_title("Steps: what a wrapper adds")


def _draw_packs(axis: Axes, cases: Cases) -> None:
    def speed(rows: dict[str, Row], name: str) -> float:
        return float(rows[name]["info"]["bytes_per_second"] / 1e9) if name in rows else 0.0

    cold = {case: rows for case, rows in cases.items() if not rows["dpfuse"]["info"]["hot"]}
    _draw_bars(axis, cold, PACK_COLOURS, speed)
    axis.set_ylabel("GB/s read and written\n(higher is better)")
    axis.set_title("Packing with scale, beside a plain copy of the same bytes")


def _draw_bars(
    axis: Axes, cases: Cases, colours: Mapping[str, str], value: Callable[[dict[str, Row], str], float]
) -> None:
    width = 0.85 / max(1, len(colours))
    for place, (name, colour) in enumerate(colours.items()):
        heights = [value(rows, name) for rows in cases.values()]
        positions = [index + (place - (len(colours) - 1) / 2) * width for index in range(len(cases))]
        # A legend omits names that begin with an underscore.
        axis.bar(positions, heights, width, label=name.lstrip("_"), color=colour)
    axis.set_xticks(range(len(cases)), list(cases), rotation=30, ha="right")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.legend(ncols=4, fontsize="small")


def _draw_overlap(axis: Axes, cases: Cases) -> None:
    present = next(iter(cases.values()))
    colours = {name: colour for name, colour in OVERLAP_COLOURS.items() if name in present}
    _draw_bars(axis, cases, colours, lambda rows, name: float(rows[name]["median"] / rows["bare"]["median"]))
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_ylabel("step over that of the bare module\n(lower is better)")
    axis.set_title("Steps in simulated networks: start-up time, and time of all bytes")


def _draw_wires(axis: Axes, cases: Cases) -> None:
    def relative(rows: dict[str, Row], name: str) -> float:
        return float(rows[name]["median"] / rows["DDP view"]["median"]) if name in rows else 0.0

    _draw_bars(axis, cases, WIRE_COLOURS, relative)
    axis.axhline(1, color="tab:red", linewidth=0.8)
    axis.set_ylabel("step over that of DDP view\n(lower is better)")
    axis.set_title("Steps by wire format")


def _draw_sharded(axis: Axes, cases: Cases) -> None:
    def relative(rows: dict[str, Row], name: str) -> float:
        return float(rows[name]["median"] / rows[PEER]["median"]) if name in rows else 0.0

    colours = {name: colour for name, colour in SHARDED_COLOURS.items() if any(name in rows for rows in cases.values())}
    _draw_bars(axis, cases, colours, relative)
    axis.axhline(1, color="tab:red", linewidth=0.8)
    axis.set_ylabel(f"training step over that of {PEER}\n(lower is better)")
    axis.set_title("Training steps with the optimizer on every rank, and in shards")


def _draw_health(axis: Axes, cases: Cases) -> None:
    _draw_bars(axis, cases, HEALTH_COLOURS, lambda rows, name: float(rows[name]["info"]["extra"] * 1e6))
    axis.set_yscale("log")
    axis.set_ylabel("us of a step\n(lower is better)")
    axis.set_title("Norm, clipping and the search for values that are not finite")


def _draw_sizes(axis: Axes, cases: Cases) -> None:
    case, rows = next(iter(cases.items()))
    cells = {
        (row["info"]["comm_buffer_size"], row["info"]["last_comm_buffer_size"]): row["median"] * 1e3
        for row in rows.values()
        if "comm_buffer_size" in row["info"]
    }
    comms, lasts = sorted({comm for comm, _ in cells}), sorted({last for _, last in cells})
    grid = [[cells[comm, last] for comm in comms] for last in lasts]
    image = axis.imshow(grid, cmap="viridis_r", aspect="auto", origin="lower")
    for y, last in enumerate(lasts):
        for x, comm in enumerate(comms):
            axis.text(x, y, f"{cells[comm, last]:.3g}", ha="center", va="center", bbox={"color": "white", "alpha": 0.7})
    axis.set_xticks(range(len(comms)), [f"{comm:g}" for comm in comms])
    axis.set_yticks(range(len(lasts)), [f"{last:g}" for last in lasts])
    axis.set_xlabel("comm_buffer_size, MB")
    axis.set_ylabel("last_comm_buffer_size, MB")
    peer = rows["DDP view"]["median"] * 1e3
    axis.set_title(f"Step of {case} in ms over the bucket sizes (DDP view: {peer:.3g} ms)")
    axis.figure.colorbar(image, ax=axis, label="ms")


PANELS: dict[str, Callable[[Axes, Cases], None]] = {
    "step": _draw_steps,
    "flatten": _draw_packs,
    "bucket_size": _draw_sizes,
    "overlap": _draw_overlap,
    "wire": _draw_wires,
    "health": _draw_health,
    "sharded": _draw_sharded,
}


def main(arguments: list[str] | None = None) -> None:
    """Plot an existing record."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=main.__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--only", nargs="*", default=(), choices=list(PANELS), help="suites to draw; all by default")
    options = parser.parse_args(arguments)
    plot_record(json.loads(options.record.read_text()), options.picture, options.only)


if __name__ == "__main__":
    main()
