"""How fast the program is under both, where the time of a step goes, and what would help. Reads traces only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpfuse.commands.doctor.runs import TUNING, Run
from dpfuse.rules.l10_each_averaged import WORTH
from dpfuse.rules.windows import is_averaged
from dpfuse.trace_file import RankTrace

__all__ = [
    "ADVISED",
    "COMPARED",
    "WORDS",
    "Advice",
    "Link",
    "SlowestRank",
    "Speed",
    "Timing",
    "measure",
    "to_try",
]

WORDS = {  # for the parts of a step; tracing is not counted
    "loader": "loader",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "device": "waiting for the GPU",
    "outside": "other",
}
PARTS = tuple(WORDS)
BEFORE = ("loader", "forward", "outside", "optimizer")  # the ranks meet in what follows
SUMS = ("nbytes", "seconds", "collectives", "exposed")  # of the communication of a run
SHORT = 64 << 10  # bytes of a message, below which its time hardly depends on its size
FEWEST = 5  # timed steps
LIMITS = 0.2  # of a step in which backward can only wait: from here on the link is the limit
LEAST = 0.005  # of a step: less is 0 %
# Seconds of all timed steps of a run. Below this, a moment in which the machine does something else decides.
BRIEF = 0.25
BUSY = 1.25  # tasks for each core of the machine, from which on other programs may decide how long a step takes
CLEAR = 2.0  # times what runs of one kind differ by: less may be chance, since there are only two of each
SLOWEST = 0.8  # of the steps in which one rank is the slowest
COMPARED = ("torch", "dpfuse")
ADVISED = {  # what a run of advice tries, and the argument of the class that the doctor runs
    "narrow": ("send 16 bits", "wire_dtype=torch.bfloat16; gradients are rounded; of dpfuse.DistributedDataParallel"),
    "tuned": ("let the tuner choose the buckets", 'plan="auto"; of dpfuse.DistributedDataParallel'),
}
FEWER = "forward and backward of the other batches inside no_sync() of the wrapped model, and step as often"


@dataclass(frozen=True)
class SlowestRank:
    """The rank for which the others wait in most steps.

    Args:
        rank: its number.
        part: of a step, in which it is late most.
        seconds: of this part that it takes more than the mean of the others.
        line: of the program, in which this part begins; empty where it is not known.
    """

    rank: int
    part: str
    seconds: float
    line: str = ""

    def explain(self) -> str:
        """Return one line."""
        what = "other code" if self.part == "outside" else self.part
        where = f" ({self.line})" if self.line else ""
        return f"rank {self.rank} is the slowest in most steps, by {1e3 * self.seconds:.3g} ms in its {what}{where}"


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
        batches: backwards before a step of the first optimizer, the mean.
        lines: of the program, in which each part begins on rank 0.
        load: as that of a run.
    """

    run: str
    wrapper: str
    steps: tuple[float, ...]
    parts: dict[str, float]
    waiting: float
    slowest: SlowestRank | None
    batches: float
    lines: dict[str, str]
    load: float

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.steps)

    @property
    def mean(self) -> float:
        """Seconds of a step, the mean over steps and ranks."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Link:
    """How gradients travel, from the runs of dpfuse.

    Args:
        bytes: of a step.
        travelling: seconds of a step in which a bucket is on its way; buckets on their way together count each.
        exposed: seconds of a step in which backward can only wait.
        step: seconds of it, the mean.
        collectives: of a step.
    """

    bytes: float
    travelling: float
    exposed: float
    step: float
    collectives: float

    @property
    def part(self) -> float:
        """The part of a step in which backward can only wait."""
        return self.exposed / self.step if self.step else 0.0

    @property
    def is_latency(self) -> bool:
        """Whether messages are so short that their number counts, and not their size."""
        return self.bytes < SHORT * self.collectives

    @property
    def is_the_limit(self) -> bool:
        """Whether waiting for it takes a large part of a step."""
        return self.part > LIMITS

    def explain(self) -> str:
        """Return one line."""
        rate = f"{self.bytes / 1e6 / self.travelling:.0f} MB/s while a bucket travels" if self.travelling else "idle"
        limit = "the link is the limit" if self.is_the_limit else "the link is not the limit"
        count = f"{self.collectives:.3g}"
        messages = f"{count} message{'s' * (count != '1')}"
        short = ", by its latency" if self.is_latency and self.is_the_limit else ""
        size = f"{self.bytes / 1e6:.3g} MB in {messages} per step"
        return f"{size}, {rate}; {self.part:.0%} of a step waits for it: {limit}{short}"


@dataclass(frozen=True)
class Advice:
    """Something that makes steps shorter.

    Args:
        what: to do.
        how: the argument or the code.
        before: seconds of a step now, the median.
        after: seconds of a step for the same number of samples.
        measured: whether `after` is the median of a run with it; else it is an estimate.
    """

    what: str
    how: str
    before: float
    after: float
    measured: bool

    def explain(self) -> str:
        """Return one sentence without a full stop."""
        if self.measured:
            times = f"a step took {1e3 * self.after:.3g} ms in a run with it, and {1e3 * self.before:.3g} without"
        else:
            times = f"up to {1 - self.after / self.before:.0%} less time for the same samples, as an estimate"
        return f"{self.what}: {times}; {self.how}"


@dataclass(frozen=True)
class Speed:
    """What was found.

    Args:
        timings: of each run that was timed.
        ratio: the median step of dpfuse over that of DDP; None if there are too few steps.
        noise: how far runs of one kind differ, as a part of a step; None where there is only one run of each kind.
        link: None where it was not measured, or the machine was busy.
        advice: what helps.
        tried: what a run of advice has shown where it does not help, in one line; empty otherwise.
    """

    timings: tuple[Timing, ...]
    ratio: float | None
    noise: float | None
    link: Link | None
    advice: tuple[Advice, ...]
    tried: str

    @property
    def is_busy(self) -> bool:
        """Whether the machine had more to do than its cores can, so that times tell nothing."""
        return is_busy(self.timings)

    @property
    def is_known(self) -> bool:
        """Whether anything can be said of how fast dpfuse is beside DDP."""
        return not (self.ratio is None or self.noise is None or is_brief(self.timings) or self.is_busy)

    @property
    def change(self) -> float:
        """The part by which a step of dpfuse is longer than one of DDP; 0 where that may be chance."""
        if self.ratio is None or self.noise is None or not self.is_known:
            return 0.0
        return 0.0 if abs(self.ratio - 1) <= max(CLEAR * self.noise, LEAST) else self.ratio - 1

    @property
    def short(self) -> str:
        """How fast dpfuse is beside DDP, in a few words."""
        if self.ratio is None:
            return "not measured"
        if self.noise is None:
            return "too few runs to say"
        if self.is_busy:
            return "too busy to say"
        if is_brief(self.timings):
            return "too short to say"
        if not self.change:
            return "no clear difference"
        return f"{abs(self.change):.0%} {'more' if self.change > 0 else 'less'} time for a step"

    @property
    def verdict(self) -> str:
        """The same as a sentence without a full stop; empty where nothing was measured."""
        if self.ratio is None:
            return ""
        if self.noise is None:
            return "each kind was run once, so it cannot be said whether dpfuse is faster"
        if self.is_busy:
            load = max(one.load for one in self.timings)
            return (
                f"nothing is said of the speed: {load:.1f} tasks ran or waited for each core of this machine; expected "
                f"at most {BUSY:g}. Run the doctor again when other programs have ended, or with fewer ranks"
            )
        if is_brief(self.timings):
            seconds = math.floor(1e3 * min(sum(one.steps) for one in self.timings)) / 1e3
            return (
                f"the timed steps of a run take {seconds:.3g} s, which is too short to say whether dpfuse is faster: "
                f"expected {BRIEF:g} s; pass more --steps"
            )
        if not self.change:
            return (
                f"no clear difference in speed: dpfuse and DDP differ by {abs(self.ratio - 1):.0%}, which is less than "
                f"twice what two runs of one kind differ by, {self.noise:.0%}"
            )
        return f"{self.short} with dpfuse than with DDP; two runs of one kind differ by {self.noise:.0%}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, and what they mean in words."""
        advice = [{**asdict(one), "text": one.explain()} for one in self.advice]
        return {**asdict(self), "advice": advice, "short": self.short, "verdict": self.verdict}


def is_brief(timings: Sequence[Timing]) -> bool:
    """Whether the timed steps of a run take so little time that they tell nothing about speed."""
    return any(sum(one.steps) < BRIEF for one in timings)


def is_busy(timings: Sequence[Timing]) -> bool:
    """Whether the machine had more to do in a run than its cores can, so that times tell nothing about speed."""
    return any(one.load > BUSY for one in timings)


def measure(runs: Sequence[Run], deep: int) -> Speed:
    """Return the times of these runs.

    Args:
        runs: those under DDP and under dpfuse, and a run of advice; those that failed are left out.
        deep: steps of the first optimizer in the beginning that are not timed.
    """
    timings = [timing for run in runs if not run.failed and (timing := _timing(run, deep)) is not None]
    compared = [one for one in timings if one.wrapper in COMPARED]
    by = {name: [one.median for one in compared if one.wrapper == name] for name in COMPARED}
    ratio = noise = None
    if by["torch"] and by["dpfuse"]:
        ratio = statistics.mean(by["dpfuse"]) / statistics.mean(by["torch"])
        noise = max((max(values) / min(values) - 1 for values in by.values() if len(values) > 1), default=None)
    link = _link(runs, compared)
    if is_busy(timings):
        return Speed(tuple(compared), ratio, noise, None, (), "")
    if noise is None or is_brief(compared):
        return Speed(tuple(compared), ratio, noise, link, (), "")
    advice, tried = _tried(runs, timings, noise)
    one_model = all(len(trace.models) == 1 for run in runs for trace in run.traces.values())
    if link is not None and link.is_the_limit and one_model and link.part / 2 > CLEAR * noise:
        advice += _fewer(link, next(one for one in compared if one.wrapper == "dpfuse"))
    return Speed(tuple(compared), ratio, noise, link, advice, tried)


def to_try(runs: Sequence[Run], deep: int) -> str:
    """Return the run of advice that would tell most, as the wrapper of a run; empty if nothing is worth one."""
    speed = measure(runs, deep)
    link = speed.link
    if link is None or link.part < WORTH or is_brief(speed.timings):
        return ""
    if link.is_the_limit and not link.is_latency:
        return "narrow"
    has_choice = link.collectives > max(len(run.traces[0].models) for run in runs if run.traces)
    return "tuned" if has_choice and min(run.steps for run in runs) >= deep + TUNING + FEWEST else ""


def _timing(run: Run, deep: int) -> Timing | None:
    if run.wrapper not in (*COMPARED, *ADVISED):
        return None
    first = deep + TUNING if run.wrapper == "tuned" else deep
    ranks = {rank: _cycles(trace)[first:] for rank, trace in run.traces.items()}
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
    late = _slowest(run, often, {rank: cycles[:count] for rank, cycles in ranks.items()}) if matters else None
    batches = statistics.mean(cycle["batches"] for cycle in ranks[0][:count])
    return Timing(run.title, run.wrapper, steps, parts, waiting, late, batches, _lines_of(run, 0), run.load)


def _lines_of(run: Run, rank: int) -> dict[str, str]:
    found: dict[str, str] = run.facts.get(str(rank), {}).get("lines", {})
    return found


def _slowest(run: Run, slowest: int, ranks: Mapping[int, Sequence[Mapping[str, float]]]) -> SlowestRank:
    late = {}
    for part in BEFORE:
        means = {rank: statistics.mean(cycle[part] for cycle in cycles) for rank, cycles in ranks.items()}
        own = means.pop(slowest)
        late[part] = own - statistics.mean(means.values())
    part = max(late, key=lambda name: late[name])
    line = "" if part == "outside" else _lines_of(run, slowest).get(part, "")
    return SlowestRank(slowest, part, late[part], line)


def _cycles(trace: RankTrace) -> list[dict[str, float]]:
    """Return seconds by part, and backwards, from one step of the first optimizer to its next.

    A GAN has two steps in each.
    """
    cycles: list[dict[str, float]] = []
    for line in trace.steps:
        if line["optimizer"] == 0 or not cycles:
            cycles.append(dict.fromkeys((*PARTS, "batches"), 0.0))
        for part in PARTS:
            cycles[-1][part] += line["times"][part]
        if line["optimizer"] == 0:
            averaged = sum(map(is_averaged, line["backwards"]))
            # Where several averages come before a step, they may be of one batch, as those of real and fake images.
            cycles[-1]["batches"] += len(line["backwards"]) if averaged == 1 else 1
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
    return Link(nbytes, seconds, exposed, statistics.mean(steps), collectives)


def _tried(runs: Sequence[Run], timings: Sequence[Timing], noise: float) -> tuple[tuple[Advice, ...], str]:
    """Return what a run of advice has shown: advice, or that it does not help. Less than the noise is no help."""
    before = [one.median for one in timings if one.wrapper == "dpfuse"]
    after = next((one for one in timings if one.wrapper in ADVISED), None)
    if after is None or not before:
        return (), ""
    what, how = ADVISED[after.wrapper]
    tunings = _tunings(runs)
    errors = [tuning["error"] for tuning in tunings if tuning["error"]]
    if errors:
        return (), f"the tuner has changed nothing: {errors[0]}"
    if not all(tuning["done"] for tuning in tunings):
        return (), ""
    now = statistics.mean(before)
    if 1 - after.median / now > max(CLEAR * noise, WORTH):
        return (Advice(what, how, now, after.median, measured=True),), ""
    times = f"a step took {1e3 * after.median:.3g} ms in a run with it, and {1e3 * now:.3g} without"
    if after.median < now:
        little = "may be chance" if 1 - after.median / now <= CLEAR * noise else f"is less than {WORTH:.0%}"
        return (), f"to {what} was tried: {times}, which {little}"
    return (), f"to {what} was tried, and saves no time: {times}"


def _fewer(link: Link, ours: Timing) -> tuple[Advice, ...]:
    """Estimate averaging half as often, which halves what a sample costs on the link; the rest of a step stays."""
    batches = max(1, round(ours.batches))
    what = f"average once in {2 * batches} batches, or double the batch"
    after = ours.median * (1 - link.part / 2)
    return (Advice(what, FEWER, ours.median, after, measured=False),)


def _tunings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return what the tuner has found for each model; rank 0's first."""
    tuned = [run for run in runs if run.wrapper == "tuned" and not run.failed]
    facts = [facts for run in tuned for facts in (run.facts.get("0"), *run.facts.values()) if facts]
    return [tuning for one in facts for tuning in one["tunings"]]
