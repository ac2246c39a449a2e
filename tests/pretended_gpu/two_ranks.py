"""`python -m tests.pretended_gpu.two_ranks FACE REPORT [NAME …]`: one rank of a job on pretended GPUs, under watch.

It runs each program twice: on the CPU, where ranks talk over gloo, and on the device. Inputs differ by rank and step.
After each step the gradients, parameters, buffers and states of the two must agree. Nothing is read in a way that lets
the host wait.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.pretended_gpu.device import host_waits, waiting
from tests.pretended_gpu.plants import PLANT_PROGRAMS, PLANTS, Plant
from tests.pretended_gpu.programs import (
    EARLY,
    FOUR,
    LATE,
    PEERS,
    PROGRAMS,
    TORCH,
    Job,
    Program,
    failing,
    replayed,
    trained,
)
from tests.pretended_gpu.watch import compared, findings, watched
from tests.pretended_gpu.ways import WAYS, accumulating, chain, in_micro_batches

__all__ = ["FACES", "programs_of"]

FACES = ("ours", "drop-in", "torch's")
FAILS_ON_BOTH = {"views", "private", "private, large gradients", "two streams, private", "buffers", "sharded"}
# Ways whose options or methods a face does not have.
LEFT_OUT = {"ours": {"face, static graph", "comm hook", "comm hook, metrics"}, "drop-in": {"factor"}}


def programs_of(face: str) -> dict[str, Program]:
    """Return the programs of one face, by name."""
    if face == "torch's":
        return TORCH
    ways = {name: way for name, way in WAYS.items() if name not in LEFT_OUT[face]}
    large = ways["private, large gradients"]  # one bucket, in which the network of the programs has a large gradient
    size = {"bucket_cap_mb" if face == "drop-in" else "comm_buffer_size": 25.0}
    wrap = replace(large.wrap, options={**large.wrap.options, **size})
    ways["private, large gradients"] = replace(large, wrap=wrap, network=chain)
    plain = {name: trained(way) for name, way in ways.items()}
    graphs = {f"{name}, captured": replayed(way) for name, way in ways.items() if way.captured}
    # The peers take no part in a backward inside no_sync(), so they would hear nothing of its failure.
    single = {name: way for name, way in ways.items() if way.step not in (accumulating, in_micro_batches)}
    if face == "drop-in":  # the ways of both faces fail in the same engine
        single = {name: way for name, way in single.items() if name in LEFT_OUT["ours"] | FAILS_ON_BOTH}
    fails = {f"{name}, failing": failing(way, EARLY | LATE, lambda net: net.large) for name, way in single.items()}
    return {**plain, **graphs, **fails, **PROGRAMS, **FOUR}


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return how far tensors are from those expected, over the largest of each, at most."""
    if len(found) != len(expected):
        return float("inf")
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if torch.equal(one, other):
            continue
        one, other = one.double(), other.double()
        apart = (one - other).abs().max() / other.abs().max().clamp(min=1e-30)
        worst = max(worst, apart.nan_to_num(float("inf"), float("inf")).item())
    return worst


def run(program: Program, cpu: Job, device: Job) -> dict[str, Any]:
    """Run a program, and return what was found."""
    result: dict[str, Any] = {"error": "", "apart": 0.0, "steps": 0}
    began, before = time.monotonic(), compared()
    try:
        expected = list(program(cpu))
        result["on the CPU"] = round(time.monotonic() - began, 1)
        with watched():
            for number, found in enumerate(program(device)):
                apart = distance(found, expected[number])
                if apart > result["apart"]:
                    result["apart"], result["step"] = apart, number
                result["steps"] += 1
            torch.cuda.synchronize()
        if result["steps"] != len(expected):
            result["error"] = f"{result['steps']} steps, expected {len(expected)}, as on the CPU"
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
        result["traceback"] = traceback.format_exc()
    result["findings"] = findings()
    result["compared"] = compared() - before
    result["seconds"] = round(time.monotonic() - began, 1)
    return result


def planted(plant: Plant, rank: int) -> Program:
    """Return the program of a plant, which is in place while it runs on the device."""
    program = {**programs_of(plant.face), **PLANT_PROGRAMS}[plant.program]

    def run_planted(job: Job) -> Iterator[list[Tensor]]:
        with pytest.MonkeyPatch.context() as patch:
            if job.device == "cuda":
                plant.plant(patch.setattr, rank)
            yield from program(job)

    return run_planted


def main(face: str, place: str, *names: str) -> None:
    """Be one rank, whose number and peers the environment tells, and write a line for each program."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.backends.cudnn.enabled = False  # its operations have no twin on the CPU
    # A mesh has one group for each part of it, on both kinds of devices.
    dist.init_process_group("nccl" if ranks == 2 else "cpu:gloo,cuda:nccl", device_id=device)
    group = dist.new_group(backend="gloo")
    PEERS.append(group)
    host_waits()
    programs = {**programs_of(face), **PLANT_PROGRAMS}
    programs |= {f"plant: {name}": planted(plant, rank) for name, plant in PLANTS.items() if plant.face == face}
    cpu, gpu = (Job(face == "drop-in", *kind, rank, ranks) for kind in (("cpu", group), ("cuda", None)))
    with open(place, "w") as report:
        for name in names or programs:
            result = run(programs[name], cpu, gpu)
            report.write(json.dumps({"name": name, "rank": rank, **result}) + "\n")
            report.flush()
            with waiting("the end of a program"):
                dist.barrier(group=group)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
