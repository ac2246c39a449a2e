"""What a trace costs: steps with `DPFUSE_TRACE` and without it, in turns, in one rank. `python -m bench.trace_cost`.

A step is forward, backward, SGD, and dropping the gradients, of 25 layers. Hashes are by name; so what a trace reads
per step is three times the gradients and three times the weights.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.commands.machine import machine_facts, software_versions
from dpfuse.trace.process_trace import start_tracer, stop_tracer

LAYERS, WIDTH = 25, 512  # 25 MB
ROUNDS, STEPS = 9, 5
READS = 6  # of the bytes of the weights


def seconds_of_a_step(folder: Path | None) -> float:
    """Time some steps of a new model, traced into a folder or not; the first ones do not count."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    tracer = None if folder is None else start_tracer(folder)
    model = dpfuse.DataParallel(net)
    if tracer is not None:
        tracer.add(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batch = torch.randn(8, WIDTH)
    for step in range(2 + STEPS):
        if step == 2:
            begin = perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    taken = (perf_counter() - begin) / STEPS
    stop_tracer()
    return taken


def main() -> None:
    """Print the medians, and write them to the file that is named."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            pairs.append((seconds_of_a_step(None), seconds_of_a_step(Path(folder))))
        line = (Path(folder) / "rank0.jsonl").read_text().splitlines()[-1]
    dist.destroy_process_group()
    nbytes = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    plain, traced = (median(column) for column in zip(*pairs, strict=True))
    extra = median(second - first for first, second in pairs)
    facts = {
        "format": "dpfuse trace cost 1",
        "machine": machine_facts(torch.device("cpu")),
        "versions": software_versions(),
        "bytes of the weights": nbytes,
        "bytes of a line": len(line),
        "seconds of a step": plain,
        "seconds of a traced step": traced,
        "extra": extra,
        "bytes read per second": READS * nbytes / extra,
        "rounds": pairs,
    }
    print(
        f"{nbytes / 1e6:.1f} MB: {plain * 1e3:.1f} ms a step, traced {traced * 1e3:.1f} ms; {extra * 1e3:.1f} ms more"
    )
    print(f"reads {READS * nbytes / extra / 1e9:.2f} GB/s; a line has {len(line)} bytes")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
