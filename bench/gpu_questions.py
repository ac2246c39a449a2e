"""`python -m bench.gpu_questions --minutes 6 --out FOLDER`: what only a GPU can answer, most valuable first.

Each answer is printed and written as it comes, so a run that is cut off leaves what it found. Every table has the
fastest rounds beside the medians, and the device's time by events beside the CPU time of the process: on a machine
whose host is shared with others, medians of the wall time tell about these others.

The group has one rank, so NCCL sends nothing. What is measured is the work around a collective, and that favours few
buckets: what a network wants is calculated by `bench.regret`.

A step is forward, backward and dropping the gradients, as in `bench.step_time`. `--quick` asks with tiny models and few
rounds, to see that every question can be asked.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, process_time, strftime
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import dpfuse
from bench.baselines import BARE, Wrap, wire_wrappers, wrappers
from bench.frozen_heap import frozen_heap
from bench.large_models import Gpt2
from bench.machine import describe, machine_name
from bench.models import CUDA_MODELS, Workload, fan
from bench.rank_group import on_ranks
from bench.step_time import Contender, contenders_of

__all__ = ["QUESTIONS", "Question", "main", "spans"]

SETTLED = 6  # steps, after which buckets are rebuilt and addresses repeat
FEWEST = 5  # rounds
TRACED = 3  # steps
MEASURES = ("device", "host", "wall")
QUICK = 1.0  # seconds for a question
LEAST = 15.0  # seconds, without which no question is begun
ROUNDS = 0.6  # of the time; the rest is for making models
Build = Callable[[], Workload]


def _gpt2() -> Workload:
    """Return GPT-2 with random weights on 8 sequences of 128 tokens, float32."""
    tokens = torch.randint(50257, (8, 128))
    return Workload(Gpt2(), lambda model: model(tokens).square().mean())


def _narrow(build: Build) -> Workload:
    workload = build()
    return Workload(workload.module.bfloat16(), workload.loss)


MODELS: dict[str, Build] = {**CUDA_MODELS, "GPT-2 b8": _gpt2}
MODELS |= {f"{name}, bfloat16": partial(_narrow, MODELS[name]) for name in ("BERT-large b8", "GPT-2 b8")}


def _sized() -> dict[str, Wrap]:
    """Return the contenders for the question of sizes: each wrapper with its default, and with another size."""
    known = wrappers()
    found = {name: known[name] for name in (BARE, "dpfuse views", "dpfuse private", "DDP default", "DDP view")}
    found["dpfuse views, 25 MB"] = lambda module: dpfuse.DataParallel(module, comm_buffer_size=25)
    found["dpfuse private, 25 MB"] = lambda module: dpfuse.DistributedDataParallel(
        module, bucket_cap_mb=25, forward_sync_buffers=False
    )
    found["DDP view, 400 MB"] = partial(
        DistributedDataParallel, bucket_cap_mb=400, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    return found


@dataclass
class _Timed:
    """One wrapped model, and what its steps took: seconds by measure."""

    step: Callable[[], None]
    buckets: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {measure: [] for measure in MEASURES})

    def time(self) -> None:
        """Run a step on an idle device."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        wall, host = perf_counter(), process_time()
        start.record()
        self.step()
        stop.record()
        host = process_time() - host  # of all threads, without the wait
        stop.synchronize()
        wall = perf_counter() - wall
        for measure, seconds in zip(MEASURES, (start.elapsed_time(stop) / 1e3, host, wall), strict=True):
            self.seconds[measure].append(seconds)


def _settled(build: Build, wraps: Mapping[str, Wrap]) -> dict[str, _Timed]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        workload = build()
    made = contenders_of(workload, wraps)
    return {name: _timed(made[name]) for name in wraps}


def _timed(contender: Contender) -> _Timed:
    for _ in range(SETTLED):
        contender.step()
    reducer: Any = getattr(contender.wrapped, "reducer", None)  # DDP's has no buckets for Python
    return _Timed(contender.step, len(reducer.buckets) if hasattr(reducer, "buckets") else 0)


def compare(build: Build, wraps: Callable[[], Mapping[str, Wrap]], seconds: float) -> list[str]:
    """Time steps of all contenders in turns.

    Args:
        build: makes the model.
        wraps: returns the contenders, with the bare module.
        seconds: for all rounds.

    Returns:
        The lines of a table, in milliseconds over the bare module: fastest round minus its fastest round, and the
        median of the differences within a round.
    """
    found, ends = _settled(build, wraps()), monotonic() + seconds
    order, names, rounds = random.Random(0), list(found), 0
    with frozen_heap():
        while rounds < FEWEST or monotonic() < ends:
            order.shuffle(names)
            for name in names:
                found[name].time()
            rounds += 1
    bare = found[BARE].seconds
    heads = [f"{measure} {kind}" for measure in MEASURES for kind in ("fastest", "median")]
    rows = [("ms over bare", "buckets", *heads)]
    for name, one in found.items():
        cells = []
        for measure in MEASURES:
            times = one.seconds[measure]
            # The bare module's row has its own times.
            base = [0.0] * len(times) if name == BARE else bare[measure]
            cells += [min(times) - min(base), median(ours - its for ours, its in zip(times, base, strict=True))]
        rows.append((name, str(one.buckets or "-"), *(f"{1e3 * cell:.2f}" for cell in cells)))
    return [*_table(rows), f"{rounds} rounds"]


def trace(build: Build, wraps: Callable[[], Mapping[str, Wrap]], seconds: float) -> list[str]:
    """Profile steps of each contender, one after the other: kernels by name, gaps between them, calls of the host.

    Args:
        build: makes the model.
        wraps: returns the contenders.
        seconds: unused; a trace has a few steps.

    Returns:
        The lines of a table for each contender: counts and microseconds per step.
    """
    lines = []
    for name, one in _settled(build, wraps()).items():
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            for _ in range(TRACED):
                torch.cuda.synchronize()
                one.step()
            torch.cuda.synchronize()
        events: Sequence[Any] = found.events() or ()
        # An annotation of the profiler spans kernels and the gaps between them.
        on_device = [
            event
            for event in events
            if event.device_type is DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        ]
        calls = Counter(event.name for event in events if event.name.startswith("cuda"))
        calls["aten::empty"] = sum(event.name.startswith("aten::empty") for event in events)
        busy, gaps = spans([(event.time_range.start, event.time_range.end) for event in on_device])
        lines.append(
            f"{name}: the device is busy for {busy / TRACED:.0f} us of a step, with gaps of {gaps / TRACED:.0f}"
        )
        times: Counter[str] = Counter()
        counts = Counter(event.name for event in on_device)
        for event in on_device:
            times[event.name] += event.time_range.end - event.time_range.start
        rows = [("us", "count", "on the device")]
        rows += [
            (f"{time / TRACED:.0f}", f"{counts[key] / TRACED:.1f}", key[:90]) for key, time in times.most_common(16)
        ]
        rows += [("-", f"{count / TRACED:.1f}", key) for key, count in calls.most_common(12)]
        lines += _table(rows)
    return lines


def spans(intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return for how long at least one of these intervals lasts, and the gaps between the first and the last.

    Example:
        >>> spans([(0, 2), (1, 3), (7, 8)])
        (4.0, 4.0)
    """
    busy = gaps = 0.0
    end: float | None = None
    for start, stop in sorted(intervals):
        if end is None:
            end = start
        gaps += max(0.0, start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy, gaps


@dataclass(frozen=True)
class Question:
    """What is asked.

    Args:
        text: the question.
        model: the name of a model.
        ask: `compare` or `trace`.
        wraps: returns the contenders.
        share: of the time for rounds; 0 for a few steps.
    """

    text: str
    model: str
    ask: Callable[[Build, Callable[[], Mapping[str, Wrap]], float], list[str]]
    wraps: Callable[[], Mapping[str, Wrap]]
    share: float


WIRE = "Why is the bfloat16 wire slower than DDP's hook?"
SIZES = "Which sizes are best?"
QUESTIONS = (
    Question(WIRE, "BERT-large b8", trace, wire_wrappers, 0.0),
    Question(WIRE, "ResNet-50 b64", trace, wire_wrappers, 0.0),
    Question(WIRE, "BERT-large b8", compare, wire_wrappers, 0.12),
    Question(SIZES, "BERT-large b8", compare, _sized, 0.2),
    Question(SIZES, "ResNet-50 b64", compare, _sized, 0.12),
    Question(SIZES, "2000 x 4 KB", compare, _sized, 0.12),
    Question(SIZES, "GPT-2 b8", compare, _sized, 0.12),
    Question(WIRE, "ResNet-50 b64", compare, wire_wrappers, 0.08),
    Question(SIZES, "BERT-large b8, bfloat16", compare, _sized, 0.12),
    Question(SIZES, "GPT-2 b8, bfloat16", compare, _sized, 0.12),
)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _ask_all(seconds: float, file: str, quick: bool) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = []
    ends = monotonic() + seconds
    for question in QUESTIONS:
        left = ends - monotonic()
        if left < LEAST and not quick:
            break
        began = monotonic()
        build = (lambda: fan(40, 256)) if quick else MODELS[question.model]
        try:
            rounds = QUICK if quick else min(ROUNDS * question.share * seconds, left / 2)
            lines = question.ask(build, question.wraps, rounds)
        except Exception as error:  # the next question may have an answer
            lines = [f"no answer: {type(error).__name__}: {error}"]
        gc.collect()
        torch.cuda.empty_cache()
        answers.append({
            "question": question.text, "model": question.model, "kind": question.ask.__name__, "answer": lines,
            "seconds": round(monotonic() - began, 1),
        })  # fmt: skip
        print(f"{question.text} {question.model}, {question.ask.__name__}", *lines, "", sep="\n", flush=True)
        record = {"machine": describe(gpu=True), "date": strftime("%Y-%m-%d"), "quick": quick, "answers": answers}
        Path(file).write_text(json.dumps(record, indent=1) + "\n")
    return answers


def main(words: Sequence[str] | None = None) -> int:
    """Ask all questions for which there is time. Return 0 if each has an answer, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_questions", description=__doc__)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="folder of the record")
    parser.add_argument("--quick", action="store_true", help="tiny models, few rounds")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("no GPU, and all of these questions are about one: nothing was asked")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{machine_name(gpu=True)}-{strftime('%Y-%m-%d')}-questions.json"
    answers = on_ranks(1, "cuda", _ask_all, 60 * options.minutes, str(file), options.quick)
    print(f"record: {file}" if answers else "there was no time for any question")
    return int(not answers or any(line.startswith("no answer") for each in answers for line in each["answer"]))


if __name__ == "__main__":
    raise SystemExit(main())
