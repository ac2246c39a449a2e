"""How fast the program is under both, where the time of a step goes, and what would help. Reads traces only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpfuse.commands.doctor.runs import Run
from dpfuse.trace.trace_file import RankTrace
from dpfuse.tune import CostTable

__all__ = ["WORDS", "WORTH", "Advice", "Link", "SlowestRank", "Speed", "Timing", "measure"]

WORDS = {  # for the parts of a step; tracing is not counted
    "loader": "loader",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "device": "waiting for the GPU",
    "outside": "other",
}
PARTS = tuple(WORDS)
BEFORE = ("loader", "forward", "outside")  # the ranks meet in what follows
SUMS = ("nbytes", "seconds", "collectives", "exposed")  # of the communication of a run
SHORT = 64 << 10  # bytes of a message, below which its time hardly depends on its size, where none was measured
LATENCY = 0.5  # of the time of a message that it would take without its bytes: more is latency
FEWEST = 5  # timed steps
LIMITS = 0.2  # of a step in which backward can only wait: from here on the link is the limit
WORTH = 0.05  # of a step; below this nothing is advised
SLOWEST = 0.8  # of the steps in which one rank is the slowest


@dataclass(frozen=True)
class SlowestRank:
    """The rank for which the others wait in most steps.

    Args:
        rank: its number.
        part: of a step, in which it is late most.
        seconds: of this part that it takes more than the mean of the others.
    """

    rank: int
    part: str
    seconds: float

    def explain(self) -> str:
        """Return one line."""
        what = "other code" if self.part == "outside" else self.part
        return f"rank {self.rank} is the slowest in most steps, by {1e3 * self.seconds:.3g} ms in its {what}"


@dataclass(frozen=True)
class Timing:
    """The timed steps of one run.

    Args:
        run: its title.
        wrapper: as that of a run.
        steps: seconds of each step, on rank 0.
        parts: mean seconds of each part, over steps and ranks.
        waiting: mean seconds in which a rank is ahead of the slowest one when backward begins.
        slowest: a rank that is the slowest in most steps, or None.
    """

    run: str
    wrapper: str
    steps: tuple[float, ...]
    parts: dict[str, float]
    waiting: float
    slowest: SlowestRank | None

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.steps)


@dataclass(frozen=True)
class Link:
    """How gradients travel, from a run of dpfuse.

    Args:
        bytes: of a step.
        travelling: seconds of a step in which a bucket is on its way; buckets on their way together count each.
        exposed: seconds of a step in which backward can only wait.
        step: seconds of it, the mean.
        collectives: of a step.
        latency: of an average message, the part of its time that a message of hardly any bytes takes as well, as the
            tuner has measured; None if it has not.
    """

    bytes: float
    travelling: float
    exposed: float
    step: float
    collectives: float
    latency: float | None = None

    @property
    def is_latency(self) -> bool:
        """Whether messages are so short that their number counts, and not their size."""
        if self.latency is not None:
            return self.latency > LATENCY
        return self.bytes < SHORT * self.collectives

    @property
    def is_the_limit(self) -> bool:
        """Whether waiting for it takes a large part of a step."""
        return self.exposed > LIMITS * self.step

    def explain(self) -> str:
        """Return one line."""
        rate = f"{self.bytes / 1e6 / self.travelling:.0f} MB/s while a bucket travels" if self.travelling else "idle"
        part = self.exposed / self.step if self.step else 0.0
        limit = "the link is the limit" if self.is_the_limit else "the link is not the limit"
        size = f"{self.bytes / 1e6:.3g} MB in {self.collectives:.3g} messages per step"
        short = ", by its latency" if self.is_latency and self.is_the_limit else ""
        return f"{size}, {rate}; {part:.0%} of a step waits for it: {limit}{short}"


@dataclass(frozen=True)
class Advice:
    """Something that would make steps shorter.

    Args:
        what: to do.
        step: seconds of a step for the same number of samples, expected.
        how: the arguments, or where to read on.
    """

    what: str
    step: float
    how: str


@dataclass(frozen=True)
class Speed:
    """What was found.

    Args:
        timings: of each run that was timed.
        ratio: the median step of dpfuse over that of DDP; None if there are too few steps.
        noise: how far this ratio goes from run to run, as a part of it.
        link: None where it was not measured.
        advice: best first.
        tuned: the tuner's result in one line; empty without one.
    """

    timings: tuple[Timing, ...]
    ratio: float | None
    noise: float
    link: Link | None
    advice: tuple[Advice, ...]
    tuned: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def measure(runs: Sequence[Run], deep: int) -> Speed:
    """Return the times of these runs.

    Args:
        runs: those under DDP and under dpfuse; those that failed are left out.
        deep: steps of the first optimizer in the beginning that are not timed.
    """
    timings = [timing for run in runs if not run.failed and (timing := _timing(run, deep)) is not None]
    by = {name: [one.median for one in timings if one.wrapper == name] for name in ("torch", "dpfuse")}
    ratio, noise = None, 0.0
    if by["torch"] and by["dpfuse"]:
        ratio = statistics.mean(by["dpfuse"]) / statistics.mean(by["torch"])
        noise = max(max(values) / min(values) - 1 for values in by.values())
    link = _link(runs, timings)
    return Speed(tuple(timings), ratio, noise, link, _advice(link), _tuned(runs))


def _timing(run: Run, deep: int) -> Timing | None:
    if run.wrapper not in ("torch", "dpfuse"):
        return None
    ranks = {rank: _cycles(trace)[deep:] for rank, trace in run.traces.items()}
    count = min(map(len, ranks.values()), default=0)
    if count < FEWEST:
        return None
    parts = {
        part: statistics.mean(cycle[part] for cycles in ranks.values() for cycle in cycles[:count]) for part in PARTS
    }
    ahead, slowest = [], []
    for step in range(count):
        busy = {rank: sum(cycles[step][part] for part in BEFORE) for rank, cycles in ranks.items()}
        last = max(busy, key=lambda rank: busy[rank])
        slowest.append(last)
        ahead.append(statistics.mean(busy[last] - value for value in busy.values()))
    steps = tuple(sum(cycle[part] for part in PARTS) for cycle in ranks[0][:count])
    often = max(set(slowest), key=slowest.count)
    waiting = statistics.mean(ahead)
    matters = len(ranks) > 1 and slowest.count(often) > SLOWEST * count and waiting > WORTH * statistics.median(steps)
    late = _slowest(often, {rank: cycles[:count] for rank, cycles in ranks.items()}) if matters else None
    return Timing(run.title, run.wrapper, steps, parts, waiting, late)


def _slowest(slowest: int, ranks: Mapping[int, Sequence[Mapping[str, float]]]) -> SlowestRank:
    late = {}
    for part in BEFORE:
        means = {rank: statistics.mean(cycle[part] for cycle in cycles) for rank, cycles in ranks.items()}
        own = means.pop(slowest)
        late[part] = own - statistics.mean(means.values())
    part = max(late, key=lambda name: late[name])
    return SlowestRank(slowest, part, late[part])


def _cycles(trace: RankTrace) -> list[dict[str, float]]:
    """Return seconds by part, from one step of the first optimizer to its next: a GAN has two steps in each."""
    cycles: list[dict[str, float]] = []
    for line in trace.steps:
        if line["optimizer"] == 0 or not cycles:
            cycles.append(dict.fromkeys(PARTS, 0.0))
        for part in PARTS:
            cycles[-1][part] += line["times"][part]
    return cycles


def _link(runs: Sequence[Run], timings: Sequence[Timing]) -> Link | None:
    """Return the mean over the runs of dpfuse, of the rank that waits least in each: others wait for ranks, too."""
    counts = {one.run: len(one.steps) for one in timings}
    found = []
    for run in runs:
        if run.wrapper != "dpfuse" or run.title not in counts:
            continue
        ranks = []
        for facts in run.facts.values():
            sums = [one for one in facts["communication"] if one["steps"]]
            if sums:  # of all models
                ranks.append([sum(one[name] for one in sums) / counts[run.title] for name in SUMS])
        if ranks:
            found.append(min(ranks, key=lambda rank: rank[-1]))
    if not found:
        return None
    steps = [statistics.mean(one.steps) for one in timings if one.wrapper == "dpfuse"]  # as the sums are means
    nbytes, seconds, collectives, exposed = (statistics.mean(values) for values in zip(*found, strict=True))
    latency = _latency(runs, nbytes / collectives) if collectives else None
    return Link(nbytes, seconds, exposed, statistics.mean(steps), collectives, latency)


def _latency(runs: Sequence[Run], message: float) -> float | None:
    """Return the part of the time of a message of so many bytes that a very short one takes; None if not measured."""
    for tuning in _tunings(runs):
        if tuning["cost"] is not None:
            cost = CostTable.from_json(tuning["cost"])
            return cost(cost.sizes[0]) / cost(max(message, cost.sizes[0]))
    return None


def _advice(link: Link | None) -> tuple[Advice, ...]:
    """Say what would help. All of these halve what a sample costs on the link; the rest of a step stays."""
    if link is None or link.exposed < WORTH * link.step:
        return ()
    half = link.step - link.exposed / 2
    fewer = Advice("average every second batch, or double the batch", half, "no_sync(); the same number of samples")
    if link.is_latency:  # which fewer bytes do not change
        return (fewer,)
    return Advice("send 16 bits", half, "a wire of 16 bits; gradients are rounded"), fewer


def _tuned(runs: Sequence[Run]) -> str:
    for tuning in _tunings(runs):
        if tuning["error"]:
            return f"the tuner has changed nothing: {tuning['error']}"
        if not tuning["done"]:
            continue
        if tuning["kept"]:
            gain = 1 - tuning["after"] / tuning["before"]
            return f'other buckets make a backward {gain:.0%} shorter: pass comm_buffer_size="auto"'
        return "the default buckets are as good as those that the tuner finds"
    return ""


def _tunings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return what the tuner has found for each model; rank 0's first."""
    tuned = [run for run in runs if run.wrapper == "tuned" and not run.failed]
    facts = [facts for run in tuned for facts in (run.facts.get("0"), *run.facts.values()) if facts]
    return [tuning for one in facts for tuning in one["tunings"]]
