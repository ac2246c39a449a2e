"""`python -m bench.profile_step`: where the time of a step goes that a wrapper adds, as a picture and a record.

Each contender runs one model in a process of its own (two for the cases on two ranks). When it is warm, py-spy looks
at its stack a hundred times a second, Python and C++ together. A look counts for the innermost frame that `LABELS`
knows. What no label knows is work of the bare step, which is not shown. Needs py-spy: `pip install py-spy`. On most
machines only root may look into another process.

Source: py-spy, https://github.com/benfred/py-spy
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn

from bench.baselines import Wrap, wrappers
from bench.bench_manual import VARIANTS, WAYS
from bench.interleave import Step, one_thread
from bench.machine import ROOT, describe
from bench.models import HOST_MODELS, PAIR_MODELS, Workload, layers
from bench.network import Cost, simulated_network
from bench.rank_group import agreed, on_ranks
from bench.sketch import Sketch
from dpfuse.tune import CostTable

__all__ = ["CASES", "Case", "draw", "labelled", "main", "profile"]

LOOKS_PER_SECOND = 100
DDP = ("DDP view + batched",)  # where this torch has it
WARM_UP = 1.0  # seconds
FEW = 5  # steps
PARENT = "_steps (bench/profile_step.py"  # below this frame is a step
BARE = "bare step"
MODEL = r"bench/(large_)?models\.py|torch/nn/(modules/(?!module\.py)|functional)"  # its own work in the forward

# The first label that matches the innermost known frame. dpfuse's own, then torch's.
LABELS: dict[str, str] = {
    "pack": r"dpfuse_kernels/|engine/feeds/",
    "waiting for the other ranks": r"Work::wait|WorkGloo|comm/(waiting|completion)",
    "sending": r"ProcessGroupGloo|gloo::|engine/exchanges/|comm/collective|allreduce",
    "noticing gradients": r"engine/(ready|listening|feature|guard|unused|window)\.py|engine/autograd\.py",
    "report and checks": r"engine/(report|messages)\.py|comm/(votes|abilities)\.py|liveness/|gradients/",
    "delivering gradients": r"engine/(delivery|averaging|buffer|memory|bucket|bucket_set)\.py",
    "forward": r"dpfuse/(wrapper|data_parallel)\.py|dpfuse/(model|ddp)/|nn/parallel/distributed\.py",
    "rest of the engine": r"dpfuse/|engine/",
    "DDP's reducer (C++)": r"c10d::Reducer|c10d::Logger",
    "sketch": r"bench/sketch\.py",
    "by hand": r"bench_manual\.py",
}
COLOURS = dict(zip(LABELS, plt.colormaps["tab20"].colors, strict=False))


class Case(NamedTuple):
    """Steps to profile: the number of ranks, what makes the step of each contender, and a simulated network if any."""

    ranks: int
    contenders: Mapping[str, Callable[[], Step]]
    cost: Cost | None = None


def _training(build: Callable[[], Workload], wrap: Wrap) -> Step:
    torch.manual_seed(dist.get_rank())
    module, loss = build()
    wrapped, params = wrap(module), list(module.parameters())

    def step() -> None:
        loss(wrapped).backward()
        for param in params:
            param.grad = None

    return step


def _averaging(way: str, number: int) -> Step:
    params = [nn.Parameter(torch.zeros(16)) for _ in range(number)]
    for param in params:
        param.grad = torch.ones(16)
    return partial(WAYS[way], params)


def _trainings(build: Callable[[], Workload], *names: str) -> dict[str, Callable[[], Step]]:
    known = {**wrappers(), "sketch": Sketch}
    return {name: partial(_training, build, known[name]) for name in names if name in known}


CASES: dict[str, Case] = {
    **{
        f"host chain {number}": Case(
            1, _trainings(partial(HOST_MODELS["chain"], number), "dpfuse views", "dpfuse private", "sketch", *DDP)
        )
        for number in (10, 100, 1000)
    },
    **{
        f"pair {name}": Case(2, _trainings(build, "dpfuse views", "dpfuse private", "sketch", "DDP view", *DDP))
        for name, build in PAIR_MODELS.items()
    },
    # All bytes take about a quarter of backward.
    "network, 20 us and 5 GB/s": Case(
        1,
        _trainings(partial(layers, 16, 768, rows=48), "dpfuse views", "dpfuse private", "DDP view", "DDP default"),
        CostTable.affine(20e-6, 5e9),
    ),
    "by hand, pair 1000 x 16": Case(2, {way: partial(_averaging, way, 1000) for way in VARIANTS[:2]}),
}


def labelled(raw: str) -> dict[str, float]:
    """Return the share of each label in the looks at a step; `BARE` is what no label knows.

    Args:
        raw: lines of py-spy's format `raw`: the frames from the outermost to the innermost, then a number of looks.

    Example:
        >>> from bench.profile_step import labelled
        >>> step = "_steps (bench/profile_step.py:1)"
        >>> labelled(f"{step};f (dpfuse/engine/report.py:2);mul (libtorch.so) 1\\n{step};mul (libtorch.so) 3")
        {'report and checks': 0.25, 'bare step': 0.75}
    """
    looks: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, number = line.rpartition(" ")
        frames = stack.split(";")
        places = [place for place, frame in enumerate(frames) if PARENT in frame]
        if places:
            inner = reversed(frames[places[-1] + 1 :])
            looks[next((found for frame in inner if (found := _label(frame))), BARE)] += int(number)
    total = sum(looks.values())
    return {label: number / total for label, number in looks.items()}


def _label(frame: str) -> str | None:
    if re.search(MODEL, frame):
        return BARE
    return next((label for label, pattern in LABELS.items() if re.search(pattern, frame)), None)


def _loop(case: str, contender: str, seconds: float, folder: str) -> None:
    """Run steps for about twice `seconds`. When it is warm, rank 0 writes its process and the time of a step."""
    step = CASES[case].contenders[contender]()
    each = _timed(step, FEW)
    each = _timed(step, agreed(max(FEW, int(WARM_UP / each)), "cpu"))
    if dist.get_rank() == 0:
        warm = Path(folder, "warm")
        warm.with_suffix(".part").write_text(json.dumps({"pid": os.getpid(), "seconds": each}))
        warm.with_suffix(".part").rename(warm)
    _steps(step, agreed(int(2 * seconds / each), "cpu"))


def _timed(step: Step, number: int) -> float:
    begin = perf_counter()
    for _ in range(number):
        step()
    return (perf_counter() - begin) / number


def _steps(step: Step, number: int) -> None:
    for _ in range(number):
        step()


def profile(case: str, contender: str, seconds: float) -> dict[str, float]:
    """Return the seconds of a step by label.

    Args:
        case: in `CASES`.
        contender: one of the case's.
        seconds: how long to look.
    """
    with tempfile.TemporaryDirectory(prefix="dpfuse-profile-") as folder:
        warm, raw = Path(folder, "warm"), Path(folder, "raw")
        options = ["--loop", case, contender, str(seconds), folder]
        command, log = [sys.executable, "-m", "bench.profile_step", *options], Path(folder, "log")
        with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, stderr=file) as process:
            try:
                while not warm.exists():
                    if process.poll() is not None:
                        raise RuntimeError(f"{case}, {contender} ended before it was warm: {log.read_text()[-2000:]}")
                    sleep(0.05)
                facts = json.loads(warm.read_text())
                look = ["record", "--native", "--idle", "--rate", str(LOOKS_PER_SECOND), "--duration", f"{seconds:g}"]
                look += ["--format", "raw", "--output", str(raw), "--pid", str(facts["pid"])]
                subprocess.run([shutil.which("py-spy") or "py-spy", *look], check=True, capture_output=True)
            finally:
                process.terminate()
        return {label: share * facts["seconds"] for label, share in labelled(raw.read_text()).items()}


def draw(found: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Draw the seconds by case, contender and label, without the bare step, as a PNG file."""
    figure, axes = plt.subplots(len(found), 1, figsize=(11, 1.6 * len(found) + 1), layout="constrained", squeeze=False)
    for (axis,), (case, contenders) in zip(axes, found.items(), strict=True):
        names = list(contenders)[::-1]
        left = [0.0] * len(names)
        for label in LABELS:
            widths = [contenders[name].get(label, 0.0) * 1e6 for name in names]
            axis.barh(names, widths, left=left, color=COLOURS[label], label=label)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axis.set_title(case, loc="left", fontsize=10)
        axis.tick_params(labelsize=8)
    axes[-1][0].set_xlabel("us of a step, rank 0, beyond the work of the bare step")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Profile all cases, or one; write the picture and the record."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile_step", description=main.__doc__)
    parser.add_argument("--only", choices=list(CASES), help="one case instead of all")
    parser.add_argument("--seconds", type=float, default=8, help="to look at each contender (default: %(default)s)")
    parser.add_argument("--record", type=Path, default=ROOT / "bench" / "results" / "profile.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "profile.png")
    parser.add_argument("--loop", nargs=4, metavar=("CASE", "CONTENDER", "SECONDS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.loop:
        name, contender, seconds, folder = options.loop
        case = CASES[name]
        if case.cost is None:
            on_ranks(case.ranks, "cpu", _loop, name, contender, float(seconds), folder)
        else:
            with simulated_network(case.cost), one_thread():
                _loop(name, contender, float(seconds), folder)
        return 0
    machine, found = describe(gpu=False), {}
    for place in [options.only] if options.only else CASES:
        found[place] = {name: profile(place, name, options.seconds) for name in CASES[place].contenders}
        print(place, json.dumps({name: _microseconds(parts) for name, parts in found[place].items()}, indent=1))
    draw(found, options.picture)
    rows = {place: {name: _microseconds(parts) for name, parts in each.items()} for place, each in found.items()}
    record = {"machine": machine, "command": "python -m bench.profile_step", "microseconds": rows}
    options.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _microseconds(parts: Mapping[str, float]) -> dict[str, float]:
    return {label: round(parts[label] * 1e6, 1) for label in (*LABELS, BARE) if label in parts}


if __name__ == "__main__":
    sys.exit(main())
