"""The numbers to reach, as ratios of two measurements of one run. Arithmetic on entries; measures nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Entry", "Outcome", "judge"]

HOST_GOALS = {10: 0.75, 100: 0.40, 1000: 0.25}  # extra CPU time over DDP default's, by number of parameters
HOST_BEST_GOAL = 0.90  # the same over the best peer's
PRIVATE_GOAL = 1.0  # private gradients, over DDP default's and over the best peer's
PAIR_GOALS = {"100 MB large": 1.00}  # whole step over the best peer's, views and private gradients
PAIR_GOAL = 0.95  # for every other model, with views
MANUAL_GOAL = 1.3  # time of fused_allreduce_gradients over one cat, all-reduce and foreach copy
FORWARD_GOAL = 0.15  # what 53 BatchNorms add to a forward, and sending their buffers to a step, over DDP's
CHECKS_GOALS = {"100 parameters": 20e-6}  # CPU seconds per step of all checks that are always on
CHECKS_PART_GOAL = 0.005  # of a step of 5 ms
TRAINING_GOALS = {"10 parameters": 10e-6, "1000 parameters": 40e-6}  # CPU seconds of a step of one backward
TRAINING_PART_GOAL = 0.005  # of a step of 5 ms
METRICS_PART_GOAL = 0.01  # of the same step, when they are read after each
LAUNCH_GOAL = 4e-6  # CPU seconds of a launch without Triton's dispatcher
PLANNING_GOALS = {1000: 0.1}  # CPU seconds, by number of gradients
CUDA_DEFAULT_GOALS = {"ResNet-50 b64": 0.25, "2000 x 4 KB": 0.15}
CUDA_BEST_GOALS = {"ResNet-50 b64": 0.5, "BERT-large b8": 0.7}
PEERS = ("DDP", "FSDP2", "DeepSpeed")  # how the names of contenders begin that are other libraries' wrappers
OVERLAP_GOAL = 1.00  # whole step in each simulated network over the best peer's, with default arguments
OVERLAP_MEAN_GOAL = 0.95  # the mean over the networks
PLANNED_GOAL = 0.98  # in each, with the plan for the network
DEFAULT_STEPS = {
    name: f"step, {name} with default arguments / the best peer" for name in ("dpfuse views", "dpfuse private")
}
STEP_ERROR = 0.05  # of a predicted step
EXPOSED_ERRORS = {"cpu": 0.15, "cuda": 0.05}  # of the predicted exposed time, if that is a large part of the step
FAIR_PART = 0.2
EXPOSED_PART = "exposed part of the step"
MODES = {"dpfuse views": 0, "dpfuse private": 1}  # unpacks per bucket, in addition to one pack
WIRE_MODES = {"dpfuse bf16 views": 1, "dpfuse bf16 private": 1}
HEALTH_GOALS = {"host 1000": 0.6}  # extra CPU time of norm, clipping and finite check over torch's
CUDA_HEALTH_GOAL = 0.4
# Gradients and buffers of a window. The gradients of the largest bucket exist twice, so this depends on the model.
PEAK_GOALS = {"pair float32": 0.65, "cuda float32": 0.6}
BYTES_GOALS = {"dpfuse bf16": 0.5, "dpfuse e4m3": 0.27, "dpfuse e5m2": 0.27}  # as a fraction of float32 gradients
ON_TOP = 1.001  # factor on bytes for the report and padding
WIRE_GOAL = 0.45  # extra GPU time with a bfloat16 wire over that of DDP with its hook


SHARDED_ZERO_GOAL = 0.6  # whole step over DDP's with ZeroRedundancyOptimizer
SHARDED_GOAL = 1.0  # over DDP's best mode with the plain optimizer
SHARDED_MUON_GOAL = 0.6  # the same with Muon
SAME_BITS_GOAL = 1.05  # step with as many fixed micro-batches as ranks, over the same with deterministic=True
SAME_BITS_DEAL_GOAL = 1.10  # the same with ranks that have several micro-batches, and not equally many
SHARDED_NETWORK_GOAL = 0.7  # the same in a simulated network where all bytes travel for a backward or more


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
    """One ratio or count, and its goal."""

    suite: str
    case: str
    what: str
    value: float | None  # None: the divisor was not above zero, so the noise exceeds the difference
    goal: float | None  # None: no goal
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal. A value that could not be measured does not meet its goal."""
        if self.goal is None:
            return None
        if self.value is None:
            return False
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def ratio(numerator: float, denominator: float) -> float | None:
    """Return the quotient, or None if the denominator is not above zero.

    Example:
        >>> from bench.goals import ratio
        >>> ratio(1.0, 4.0), ratio(1.0, -0.1)
        (0.25, None)
    """
    return numerator / denominator if denominator > 0 else None


def judge(entries: Iterable[Entry]) -> list[Outcome]:
    """Return every goal with measurements in `entries`, in the order of the cases."""
    cases: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in entries:
        cases.setdefault((entry.suite, entry.case), {})[entry.variant] = entry
    outcomes = [
        outcome
        for (suite, case), contenders in cases.items()
        if suite in JUDGES
        for outcome in JUDGES[suite](case, contenders)
    ]
    return [*outcomes, *_whole_grid(outcomes)]


def _step(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    kind, _, rest = case.partition(" ")
    if kind == "host":
        yield from _host(case, int(rest.split()[-1]), contenders)
    elif kind == "no_sync":
        yield from _no_sync(case, contenders)
    elif kind == "pair":
        yield from _pair(case, rest, contenders)
    elif kind == "cuda" and rest.startswith("wire "):
        yield from _cuda_wire(case, contenders)
    elif kind == "cuda":
        yield from _cuda(case, rest, contenders)


def _host(case: str, count: int, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    best = _best(contenders, lambda entry: entry.info["extra"])
    yield _extra(case, contenders, "dpfuse views", "DDP default", HOST_GOALS.get(count))
    yield _extra(case, contenders, "dpfuse views", best, HOST_BEST_GOAL, note="the best peer, ")
    yield _extra(case, contenders, "dpfuse private", "DDP default", PRIVATE_GOAL)
    yield _extra(case, contenders, "dpfuse private", best, PRIVATE_GOAL, note="the best peer, ")
    if "sketch" in contenders:
        yield _extra(case, contenders, "sketch", "DDP default", None)


def _best(contenders: dict[str, Entry], seconds: Callable[[Entry], float]) -> str:
    """Return the name of the fastest wrapper of another library."""
    return min((name for name in contenders if name.startswith(PEERS)), key=lambda name: seconds(contenders[name]))


def _no_sync(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    bare = contenders["bare"].median
    peer = 1 + contenders["DDP default"].info["extra"] / bare
    value = 1 + contenders["dpfuse views"].info["extra"] / bare
    yield Outcome("step", case, f"step, dpfuse / bare (DDP here: {peer:.3f})", value, max(1.05, peer + 0.02))


def _pair(case: str, model: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    best = _best(contenders, lambda entry: entry.median)
    goal = PAIR_GOALS.get(model, PAIR_GOAL)
    for peer, note in ((best, "the best peer, "), ("DDP default", "")):
        for ours in MODES:
            judged = bool(note) and (ours == "dpfuse views" or model in PAIR_GOALS)
            yield _whole(case, contenders, ours, peer, goal if judged else None, note)


def _cuda(case: str, model: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    yield _extra(case, contenders, "dpfuse views", "DDP default", CUDA_DEFAULT_GOALS.get(model))
    best = _best(contenders, lambda entry: entry.info["extra"])
    yield _extra(case, contenders, "dpfuse views", best, CUDA_BEST_GOALS.get(model), note="the best peer, ")
    yield _extra(case, contenders, "dpfuse private", "DDP default", None)
    yield from _cuda_counts(case, contenders, MODES)


def _cuda_wire(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    hooks = [mode for mode in contenders if mode.endswith("bf16 hook")]
    best = min(hooks, key=lambda mode: contenders[mode].info["extra"])
    for mode, goal in zip(WIRE_MODES, (WIRE_GOAL, None), strict=True):
        yield _extra(case, contenders, mode, best, goal, note="its best mode, ")
    yield from _cuda_counts(case, contenders, WIRE_MODES)


def _cuda_counts(case: str, contenders: dict[str, Entry], modes: dict[str, int]) -> Iterator[Outcome]:
    for mode, unpacks in modes.items():
        facts = contenders[mode].info
        buckets = facts["buckets"]
        yield Outcome("step", case, f"kernels per bucket, {mode}", _kernels(facts) / buckets, 1 + unpacks)
        more = facts["host_to_device"] - contenders["bare"].info["host_to_device"]
        yield Outcome("step", case, f"host-to-device copies, {mode}", more, 0)


def _kernels(facts: dict[str, Any]) -> float:
    # No pack in the trace means that the profiler recorded nothing, not that nothing was launched.
    return float(facts["packs"] + facts["unpacks"]) if facts["packs"] else float("inf")


def _extra(
    case: str, contenders: dict[str, Entry], ours: str, peer: str, goal: float | None, note: str = ""
) -> Outcome:
    value = ratio(contenders[ours].info["extra"], contenders[peer].info["extra"])
    return Outcome(contenders[ours].suite, case, f"extra over bare, {ours} / {note}{peer}", value, goal)


def _whole(
    case: str, contenders: dict[str, Entry], ours: str, peer: str, goal: float | None, note: str = ""
) -> Outcome:
    value = ratio(contenders[ours].median, contenders[peer].median)
    return Outcome("step", case, f"step, {ours} / {note}{peer}", value, goal)


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
    yield _extra(case, contenders, "dpfuse", "DDP default", None if case.endswith("step") else FORWARD_GOAL)
    yield _extra(case, contenders, "dpfuse, nothing sent", "DDP, nothing sent", None)
    ours, peer = (contenders[name].info["sending"] for name in ("dpfuse", "DDP default"))
    goal = FORWARD_GOAL if case.startswith("pair") and case.endswith("step") else None
    yield Outcome("forward", case, "what sending buffers adds, dpfuse / DDP default", ratio(ours, peer), goal)


def _checks(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    extra = contenders["with checks"].info["extra"]
    if case == "step of 5 ms":
        part = ratio(extra, contenders["without checks"].median)
        yield Outcome("checks", case, "part of the step that the checks take", part, CHECKS_PART_GOAL)
        for name in ("with metrics", "with metrics of every 20th"):
            metrics = ratio(contenders[name].info["extra"], contenders["with checks"].median)
            yield Outcome("checks", case, f"part of the step that it takes, {name}", metrics, METRICS_PART_GOAL)
    else:
        yield Outcome("checks", case, "CPU seconds of the checks in a step", extra, CHECKS_GOALS.get(case))


def _training(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    extra, inside = (contenders[name].info["extra"] for name in ("checked", "its calls"))
    yield Outcome("training", case, "CPU seconds of the checks in a step", extra, None)
    if case == "step of 5 ms":
        part = ratio(inside, contenders["not checked"].median)
        yield Outcome("training", case, "part of the step in their calls", part, TRAINING_PART_GOAL)
    else:
        yield Outcome("training", case, "seconds in their calls in a step", inside, TRAINING_GOALS.get(case))


def _accumulate(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    peers = [name for name in contenders if name.startswith("DDP")]
    peer = "main_grad" if "16" in case else min(peers, key=lambda name: contenders[name].info["peak"])
    for ours in ("dpfuse accumulating views", "dpfuse views", "dpfuse private"):
        value = ratio(contenders[ours].info["peak"], contenders[peer].info["peak"])
        goal = PEAK_GOALS.get(case) if "accumulating" in ours else None
        yield Outcome("accumulate", case, f"peak bytes of gradients and buffers, {ours} / {peer}", value, goal)
    peer = min([*peers, "main_grad"], key=lambda name: contenders[name].median)
    value = ratio(contenders["dpfuse accumulating views"].median, contenders[peer].median)
    yield Outcome("accumulate", case, f"window, dpfuse accumulating views / {peer}", value, None)


def _health(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    goal = CUDA_HEALTH_GOAL if case.startswith("cuda") else HEALTH_GOALS.get(case)
    yield _extra(case, contenders, "dpfuse", "torch clip + unscale", goal)
    yield _extra(case, contenders, "dpfuse, below the limit", "torch clip + unscale", None)
    if "dpfuse scaler" in contenders:
        yield _extra(case, contenders, "dpfuse scaler", "torch clip + unscale", None)


def _clip(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    for kind, peer in (("views", "DDP view"), ("private", "DDP default")):
        ours = f"dpfuse {kind}"
        value = ratio(contenders[ours].info["extra"], contenders[peer].info["extra"])
        yield Outcome("clip", case, f"what clipping adds, {ours} / {peer}", value, None)
        value = ratio(contenders[ours].median, contenders[peer].median)
        yield Outcome("clip", case, f"step with clipping, {ours} / {peer}", value, None)


def _overlap(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    ours, unsent = contenders["dpfuse planned"], contenders["dpfuse planned, nothing sent"]
    exposed, predicted = ours.info["exposed"], ours.info["predicted"]
    expected = unsent.median + predicted
    yield Outcome("overlap", case, "error of the predicted step", abs(exposed - predicted) / expected, STEP_ERROR)
    goal = EXPOSED_ERRORS[ours.info["device"]] if predicted >= FAIR_PART * expected else None
    error = ratio(abs(exposed - predicted), predicted)
    yield Outcome("overlap", case, "error of the predicted exposed time", error, goal)
    error = ratio(abs(exposed - ours.info["predicted_packed"]), ours.info["predicted_packed"])
    yield Outcome("overlap", case, "the same, if the time for packing had been predicted, too", error, None)
    best = _best(contenders, lambda entry: entry.median)
    for name, what in DEFAULT_STEPS.items():
        value = ratio(contenders[name].median, contenders[best].median)
        yield Outcome("overlap", case, f"{what}, {best}", value, OVERLAP_GOAL)
    value = ratio(ours.median, contenders[best].median)
    yield Outcome("overlap", case, f"step, dpfuse planned / the best peer, {best}", value, PLANNED_GOAL)
    for rule in (name for name in contenders if name.endswith("'s rule")):
        for name in ("dpfuse views", "dpfuse planned"):
            value = ratio(contenders[name].median, contenders[rule].median)
            yield Outcome("overlap", case, f"step, {name} / {rule}", value, None)
    yield Outcome("overlap", case, EXPOSED_PART, ratio(exposed, ours.median), None)


def _whole_grid(outcomes: list[Outcome]) -> Iterator[Outcome]:
    """Require networks with much exposed time: if nearly all is hidden, every prediction and plan is good."""
    parts = [outcome.value or 0.0 for outcome in outcomes if outcome.what == EXPOSED_PART]
    if parts:
        count, least = sum(part > FAIR_PART for part in parts), len(parts) / 4
        yield Outcome(
            "overlap", "all", f"networks with more than {FAIR_PART:.0%} of the step exposed", count, least, True
        )
        for what in DEFAULT_STEPS.values():
            steps = [outcome.value or 0.0 for outcome in outcomes if outcome.what.startswith(what)]
            yield Outcome("overlap", "all", f"{what}, mean", sum(steps) / len(steps), OVERLAP_MEAN_GOAL)


def _kernels_suite(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    if case == "launch":
        bound, dispatched = contenders["bound"], contenders["kernel[grid]"]
        yield Outcome("kernels", case, "CPU time, bound / kernel[grid]", ratio(bound.median, dispatched.median), None)
        # Without a bound kernel, the time would be that of the dispatcher.
        seconds = bound.median if bound.info["bound"] else None
        yield Outcome("kernels", case, "CPU seconds of a bound launch", seconds, LAUNCH_GOAL)
        return
    if case.startswith("adamw"):
        ours = contenders["adamw_step"].median
        value = ratio(ours, contenders["torch's fused AdamW"].median)
        yield Outcome("kernels", case, "time, adamw_step / torch's fused AdamW", value, None)
        value = ratio(contenders["copy_ of the same bytes"].median, ours)
        yield Outcome("kernels", case, "copy_ of the same bytes / adamw_step, times", value, None, True)
        return
    shapes = {name: entry for name, entry in contenders.items() if "elements" in name}
    best = min(shapes, key=lambda name: shapes[name].median)
    usual = next(entry for entry in shapes.values() if entry.info["default"])
    value = ratio(shapes[best].median, usual.median)
    yield Outcome("kernels", case, f"time, best shape ({best}) / {usual.variant} as in use", value, None)
    value = ratio(contenders["copy_ of the same bytes"].median, shapes[best].median)
    yield Outcome("kernels", case, "copy_ / best shape, times", value, None, True)


def _planner(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    exact = contenders["exact planner"]
    if case == "brute force":
        what = f"models of {exact.info['cases']} on which another plan is better"
        yield Outcome("planner", case, what, exact.info["differences"], 0)
    elif len(contenders) == 1:
        goal = PLANNING_GOALS.get(exact.info["gradients"])
        yield Outcome("planner", case, "CPU seconds to plan", exact.median, goal)
    else:
        rivals = [entry for entry in contenders.values() if entry is not exact]
        earlier = sum(entry.info["earlier"] for entry in rivals)
        yield Outcome(
            "planner", case, f"earlier ends of {exact.info['networks'] * len(rivals)} rival plans", earlier, 0
        )
        for entry in rivals:
            what = f"end, {entry.variant} / exact, where it is worst"
            yield Outcome("planner", case, what, entry.info["worst"], None)


def _wire(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    for name, ours in contenders.items():
        if not name.startswith("dpfuse"):
            continue
        for peer in ("DDP view", "DDP bf16 hook"):
            value = ratio(ours.median, contenders[peer].median)
            yield Outcome("wire", case, f"step, {name} / {peer}", value, None)
        if "bytes" in ours.info:
            goal = next((goal * ON_TOP for kind, goal in BYTES_GOALS.items() if name.startswith(kind)), None)
            value = ratio(ours.info["bytes"], ours.info["gradient_bytes"])
            yield Outcome("wire", case, f"bytes sent, {name} / gradients", value, goal)


def _manual(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    for peer in contenders:
        if peer != "dpfuse":
            value = ratio(contenders["dpfuse"].median, contenders[peer].median)
            goal = MANUAL_GOAL if case == "pair 1000 x 16" and peer.startswith("cat") else None
            yield Outcome("manual", case, f"fused_allreduce_gradients / {peer}", value, goal)


def _sharded(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    plain = min(("DDP default", "DDP views"), key=lambda name: contenders[name].median)
    goals: dict[str, float | None] = {"DDP with ZeroRedundancyOptimizer": SHARDED_ZERO_GOAL, plain: SHARDED_GOAL}
    if case == "Muon":
        goals = {"DDP with ZeroRedundancyOptimizer": None, plain: SHARDED_MUON_GOAL}  # each rank has half of the work
    elif case.startswith("cuda"):
        goals = dict.fromkeys(goals)  # on one GPU, a rank updates all parameters
    elif case.startswith("network"):
        goals = {plain: SHARDED_NETWORK_GOAL if case.endswith((" 1 backward", " 2 backward")) else SHARDED_GOAL}
    for name in [name for name in contenders if name.startswith("dpfuse sharded")]:
        for peer in contenders:
            if peer in goals or not peer.startswith(("DDP", "dpfuse sharded")):
                value = ratio(contenders[name].median, contenders[peer].median)
                yield Outcome("sharded", case, f"training step, {name} / {peer}", value, goals.get(peer))


def _same_bits(case: str, contenders: dict[str, Entry]) -> Iterator[Outcome]:
    ours, peer = contenders["fixed"], contenders["deterministic"]
    count, ranks = re.findall(r"\d+", case)[:2]
    goal = SAME_BITS_GOAL if count == ranks else SAME_BITS_DEAL_GOAL
    yield Outcome("same_bits", case, "step, fixed / deterministic", ratio(ours.median, peer.median), goal)
    yield Outcome("same_bits", case, "fastest step, fixed / deterministic", ratio(ours.min, peer.min), None)
    value = ratio(ours.median, contenders["default"].median)
    yield Outcome("same_bits", case, "step, fixed / default", value, None)


JUDGES: dict[str, Callable[[str, dict[str, Entry]], Iterator[Outcome]]] = {
    "flatten": _flatten,
    "bucket_size": _bucket_size,
    "step": _step,
    "forward": _forward,
    "checks": _checks,
    "training": _training,
    "accumulate": _accumulate,
    "health": _health,
    "clip": _clip,
    "planner": _planner,
    "kernels": _kernels_suite,
    "overlap": _overlap,
    "wire": _wire,
    "manual": _manual,
    "sharded": _sharded,
    "same_bits": _same_bits,
}
