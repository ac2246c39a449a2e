"""Draws what torch's profiler records of one step: python docs/images/draw_trace.py. Needs matplotlib.

Two gloo ranks train a network of eight layers on this machine. The picture shows rank 0. It is an example of a trace,
and no measurement: the profiler itself takes time.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dpfuse

PICTURE = Path(__file__).parent / "trace.png"
LAYERS = 8
ROWS = {  # of the picture, from the top: how the names of events begin, and their colour
    "forward and backward": (("aten::addmm", "aten::mm", "aten::tanh", "aten::sum"), "0.75"),
    "dpfuse::pack": (("dpfuse::pack",), "tab:orange"),
    "gloo:all_reduce": (("gloo:all_reduce",), "tab:blue"),
    "dpfuse::wait": (("dpfuse::wait",), "tab:red"),
}


def record(path: str) -> None:
    """Write the trace of one step of rank 0 to `path`; it runs on each rank."""
    dpfuse.init_parallel_env()
    torch.set_num_threads(1)
    net = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(512, 512), nn.Tanh())))
    model = dpfuse.DataParallel(net, comm_buffer_size=2, last_comm_buffer_size=1, plan="greedy")
    batch = torch.randn(512, 512)
    for _ in range(5):
        model(batch).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        model(batch).sum().backward()
    if dpfuse.get_rank() == 0:
        recorded.export_chrome_trace(path)


def main() -> None:
    """Record the trace and draw it."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        dpfuse.spawn(record, (path,), nprocs=2)
        events = [event for event in json.loads(Path(path).read_text())["traceEvents"] if event.get("ph") == "X"]
    chosen = {row: [event for event in events if event["name"].startswith(names)] for row, (names, _) in ROWS.items()}
    begin = min(event["ts"] for row in chosen.values() for event in row)
    figure = Figure(figsize=(9.5, 2.6), layout="constrained")
    axis = figure.subplots()
    for place, (row, (_, colour)) in enumerate(ROWS.items()):
        for event in chosen[row]:
            left = (event["ts"] - begin) / 1000
            axis.barh(
                place, event["dur"] / 1000, left=left, height=0.62, color=colour, edgecolor="white", linewidth=0.4
            )
    axis.set_yticks(range(len(ROWS)), list(ROWS))
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.set_title("one step of rank 0, as torch.profiler sees it", fontsize=10)
    figure.savefig(PICTURE, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
