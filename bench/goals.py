"""The numbers to reach, as ratios of two measurements of one run. Arithmetic on entries; measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Entry", "Outcome", "judge"]

HOST_GOALS = {10: 0.5, 100: 0.38, 1000: 0.30}  # extra CPU time over DDP default's, by number of parameters
FORWARD_GOAL = 0.3  # extra CPU time of a forward with 53 BatchNorms over DDP's
CUDA_DEFAULT_GOALS = {"ResNet-50 b64": 0.25, "2000 x 4 KB": 0.15}
CUDA_BEST_GOALS = {"ResNet-50 b64": 0.5, "BERT-large b8": 0.7}
DDP_MODES = ("DDP default", "DDP view", "DDP batched", "DDP view + batched")
MODES = {"dpfuse views": 0, "dpfuse private": 1}  # unpacks per bucket, beside one pack


@dataclass(frozen=True)
class Entry:
    """One contender in one case; times in seconds."""

    suite: str
    case: str
    variant: str
    median: float
    min: float
    iqr: float
    rounds: int
    info: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One ratio or count, and whether it is what it should be."""

    suite: str
    case: str
    what: str
    value: float | None  # None: what it is divided by was not above zero, so the noise exceeds the difference
    goal: float | None  # None: for information
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """None without a goal; a value that could not be measured has not met its goal."""
        if self.goal is None:
            return None
        if self.value is None:
            return False
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def ratio(numerator: float, denominator: float) -> float | None:
    """Their quotient, or None if the denominator is not above zero.

    Example:
        >>> from bench.goals import ratio
        >>> ratio(1.0, 4.0), ratio(1.0, -0.1)
        (0.25, None)
    """
    return numerator / denominator if denominator > 0 else None


def judge(entries: Iterable[Entry]) -> list[Outcome]:
    """Every goal for which `entries` hold the measurements, in the order of the cases."""
    cases: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in entries:
        cases.setdefault((entry.suite, entry.case), {})[entry.variant] = entry
    return [
        outcome
        for (suite, case), contenders in cases.items()
        if suite in JUDGES
        for outcome in JUDGES[suite](case, contenders)
    ]


def _step(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    kind, _, rest = case.partition(" ")
    if kind == "host":
        yield from _host(case, int(rest.split()[-1]), contenders)
    elif kind == "no_sync":
        yield from _no_sync(case, contenders)
    elif kind == "pair":
        yield from _pair(case, rest, contenders)
    elif kind == "cuda":
        yield from _cuda(case, rest, contenders)


def _host(case: str, count: int, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    yield _extra(case, contenders, "dpfuse views", "DDP default", HOST_GOALS.get(count))
    yield _extra(case, contenders, "dpfuse private", "DDP default", None)
    if "DDP view + batched" in contenders:
        yield _extra(case, contenders, "dpfuse views", "DDP view + batched", 0.75 if count >= 100 else None)


def _no_sync(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    bare = contenders["bare"].median
    peer = 1 + contenders["DDP default"].info["extra"] / bare
    value = 1 + contenders["dpfuse views"].info["extra"] / bare
    yield Outcome("step", case, f"step, dpfuse / bare (DDP here: {peer:.3f})", value, max(1.05, peer + 0.02))


def _pair(case: str, model: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    peer, goal = ("DDP default", 0.85) if model == "1000 tiny" else ("DDP view", 1.0)
    yield _whole(case, contenders, "dpfuse views", peer, goal)
    yield _whole(case, contenders, "dpfuse private", "DDP default", None)


def _cuda(case: str, model: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    yield _extra(case, contenders, "dpfuse views", "DDP default", CUDA_DEFAULT_GOALS.get(model))
    present = [mode for mode in DDP_MODES if mode in contenders]
    best = min(present, key=lambda mode: contenders[mode].info["extra"])
    yield _extra(case, contenders, "dpfuse views", best, CUDA_BEST_GOALS.get(model), note="its best mode, ")
    yield _extra(case, contenders, "dpfuse private", "DDP default", None)
    for mode, unpacks in MODES.items():
        facts = contenders[mode].info
        buckets = facts["buckets"]
        yield Outcome("step", case, f"kernels per bucket, {mode}", _kernels(facts) / buckets, 1 + unpacks)
        more = facts["host_to_device"] - contenders["bare"].info["host_to_device"]
        yield Outcome("step", case, f"host-to-device copies, {mode}", more, 0)


def _kernels(facts: dict[str, Any]) -> float:
    # No pack in the trace means that the profiler saw nothing, not that nothing was launched.
    return float(facts["packs"] + facts["unpacks"]) if facts["packs"] else float("inf")


def _extra(
    case: str, contenders: dict[str, Entry], ours: str, peer: str, goal: float | None, note: str = ""
) -> Outcome:
    value = ratio(contenders[ours].info["extra"], contenders[peer].info["extra"])
    return Outcome(contenders[ours].suite, case, f"extra over bare, {ours} / {note}{peer}", value, goal)


def _whole(case: str, contenders: dict[str, Entry], ours: str, peer: str, goal: float | None) -> Outcome:
    value = ratio(contenders[ours].median, contenders[peer].median)
    return Outcome("step", case, f"step, {ours} / {peer}", value, goal)


def _flatten(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    ours = contenders["dpfuse"]
    on_gpu, nbytes = ours.info["cuda"], ours.info["bytes"]
    judged = on_gpu and not ours.info["hot"] and ours.info["network"]
    ceiling = contenders["copy_ of the same bytes"].median
    goal = {25: 0.90, 100: 0.95, 400: 0.95}.get(nbytes >> 20) if judged else None
    yield Outcome("flatten", case, "copy_ / pack with scale, times", ratio(ceiling, ours.median), goal, True)
    foreach = contenders["_foreach_copy_ + mul_"].median
    at_25 = judged and nbytes == 25 << 20
    yield Outcome(
        "flatten",
        case,
        "_foreach_copy_ + mul_ / pack with scale",
        ratio(foreach, ours.median),
        2.0 if at_25 else None,
        True,
    )
    peers = ("_foreach_copy_", "cat(out=)", "_flatten_dense_tensors")
    best = min(peers, key=lambda peer: contenders[peer].median)
    value = ratio(contenders[best].median, ours.median)
    what = f"best unscaled call ({best}) / pack with scale"
    yield Outcome("flatten", case, what, value, 1.2 if at_25 else None, True)


def _bucket_size(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    ours = [entry for entry in contenders.values() if "comm_buffer_size" in entry.info]
    best = min(ours, key=lambda entry: entry.median)
    value = ratio(best.median, contenders["DDP view"].median)
    yield Outcome("bucket_size", case, f"step, best sizes ({best.variant}) / DDP view", value, None)


def _forward(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    yield _extra(case, contenders, "dpfuse", "DDP default", None if case.startswith("pair") else FORWARD_GOAL)
    yield _extra(case, contenders, "dpfuse, nothing sent", "DDP, nothing sent", None)


JUDGES: dict[str, Callable[[str, dict[str, Entry]], Iterator[Outcome]]] = {
    "flatten": _flatten,
    "bucket_size": _bucket_size,
    "step": _step,
    "forward": _forward,
}
