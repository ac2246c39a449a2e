"""`python -m bench.regret`: how much later steps end by simple rules for buckets than by the best plan, as tables.

A rule knows the order of gradients, their sizes and the number of ranks, but no times. The exact planner knows all.
Both are compared on backwards that were recorded, and on one of 7 B parameters that is calculated, at loads of 1/8 to
4: at load 1 the network needs as long for the bytes as backward takes. Each bucket also pays the start-up time of a
collective, from 2 to 16,384 ranks, and some time of the host, which delays the gradients that follow. The regret is the
end of the step (backward and all communication), divided by that of the best plan. Nothing is measured:
`bench.simulation` computes every end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.architectures import llama_7b
from bench.machine import describe
from bench.nccl_model import ETHERNET, INFINIBAND, NVLINK
from bench.published_plans import capped_plan, ddp_plan, paddle_plan, ramp_plan
from bench.record_timeline import MODELS, load
from bench.simulation import simulate
from dpfuse import ParamSpec
from dpfuse.engine.bucket_sizes import ON_GPU, Ramp, ramp_limits
from dpfuse.engine.plan import MB, BucketPlan, assign_buckets
from dpfuse.model.plan_from_groups import plan_from_groups
from dpfuse.tune import CostTable, Timeline, optimal_plan

SMALL = ("tiny_2000", "layers_300")
RECORD = Path(__file__).parent / "results" / "regret.json"
LOADS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
HOST = (0.0, 100e-6, 300e-6)  # seconds of the host for each bucket


def _presets(names: Iterable[Any], *ranks: int) -> dict[str, tuple[int, float]]:
    return {f"{link.name} {count}": (count, link.cost(count)(0.0)) for count in ranks for link in names}


# Each network with its number of ranks, and the seconds that a collective of few bytes takes.
NETWORKS: dict[str, tuple[int, float]] = {
    "shared memory": (2, 20e-6),
    "two servers, TCP": (2, 150e-6),
    "eight servers, slow TCP": (8, 500e-6),
    **_presets([NVLINK], 8),
    **_presets([NVLINK, INFINIBAND, ETHERNET], 16, 64),
    **_presets([INFINIBAND, ETHERNET], 256, 1024, 4096, 16384),
}
Rule = Callable[[Timeline, int], BucketPlan]  # of a backward and a number of ranks


def _default(timeline: Timeline, ranks: int, size: float | None = None) -> BucketPlan:
    return ramp_plan(timeline, size, ranks=ranks)


def _ramp(timeline: Timeline, ranks: int, ramp: Ramp) -> BucketPlan:
    total = sum(timeline.nbytes)
    limits = ramp_limits(total, 25 * MB + total / ramp.share, MB, ranks, ramp)
    groups = assign_buckets(timeline.specs, limits, timeline.order[::-1])[::-1]
    return plan_from_groups(timeline.specs, [group.members for group in groups])


def _equal_parts(timeline: Timeline, ranks: int, count: int) -> BucketPlan:
    return capped_plan(timeline, sum(timeline.nbytes) / count / MB)


RULES: dict[str, Rule] = {
    "dpfuse, default": _default,
    "dpfuse, 25 MB passed": partial(_default, size=25),
    'Paddle 25 + 1 MB, dpfuse plan="greedy"': lambda timeline, ranks: paddle_plan(timeline),
    "torch's DDP, 1 + 25 MB": lambda timeline, ranks: ddp_plan(timeline),
    "eight equal buckets": partial(_equal_parts, count=8),
    **{
        f"ramp with {name}": partial(_ramp, ramp=ON_GPU._replace(**other))
        for name, other in {
            "4 parts, ends of 1/4, 1 MB at least": {"parts": 4, "end": 4, "least": MB},
            "4 parts": {"parts": 4},
            "6 parts": {"parts": 6},
            "10 parts": {"parts": 10},
            "ends of 1/2": {"end": 2},
            "ends of 1/4": {"end": 4},
            "factor 1.5": {"growth": 1.5},
            "factor 3": {"growth": 3},
            "256 KB at least": {"least": MB / 4},
            "1 MB at least": {"least": MB},
            "no cap": {"share": 1},
            "a cap that grows by 1/20": {"share": 20},
        }.items()
    },
}


class Backward(NamedTuple):
    """A backward, on a GPU."""

    model: str
    timeline: Timeline

    def planned(self, rule: str, ranks: int, host: float) -> tuple[BucketPlan, Timeline]:
        """Return the plan of a rule, and the backward with the host's time for its buckets in it."""
        return _planned(self, rule, ranks, host)


@cache
def _planned(backward: Backward, rule: str, ranks: int, host: float) -> tuple[BucketPlan, Timeline]:
    plan = RULES[rule](backward.timeline, ranks)
    return plan, delayed(backward.timeline, plan, host)


def delayed(timeline: Timeline, plan: BucketPlan, host: float) -> Timeline:
    """Return the backward where each bucket takes so many seconds of the host once its last gradient is ready."""
    complete = sorted((max(timeline.ready[index] for index in bucket.params), bucket.params) for bucket in plan.buckets)
    ends = np.array([ready for ready, _ in complete])
    late = np.searchsorted(ends, timeline.ready, side="left") * host  # the buckets that were complete before it
    for place, (_, params) in enumerate(complete):  # what completes a bucket is sent once the host has packed it
        last = max(params, key=timeline.ready.__getitem__)
        late[last] = ends[place] - timeline.ready[last] + (place + 1) * host
    ready = tuple(map(float, np.array(timeline.ready) + late))
    return Timeline(timeline.specs, ready, timeline.backward_end + len(complete) * host)


class Cell(NamedTuple):
    """The regret of a rule in one place."""

    rule: str
    host: float
    model: str
    network: str
    load: float
    regret: float


def regrets(backwards: Sequence[Backward]) -> Iterator[Cell]:
    """Yield the regret of each rule, for each backward, network, load and time of the host."""
    for backward, (network, (ranks, latency)), share in product(backwards, NETWORKS.items(), LOADS):
        timeline = backward.timeline
        bandwidth = sum(timeline.nbytes) / (share * timeline.backward_end)
        cost = CostTable.affine(latency, bandwidth)
        # It knows no time of the host: it plans with each as a part of the start-up time. The best plan counts.
        best = [optimal_plan(timeline, CostTable.affine(latency + host, bandwidth)) for host in HOST]
        for host in HOST:
            least = min(simulate(delayed(timeline, plan, host), plan, cost).end for plan in best)
            for rule in RULES:
                plan, late = backward.planned(rule, ranks, host)
                regret = simulate(late, plan, cost).end / least
                yield Cell(rule, host, backward.model, network, share, round(regret, 4))


def table(cells: Sequence[Cell]) -> list[str]:
    """Return the mean and the worst regret of each rule by the time of the host, as the lines of a Markdown table."""
    heads = " | ".join(f"{host * 1e6:.0f} µs" for host in HOST)
    lines = [f"| rule | {heads} |", "|---|" + "---|" * len(HOST)]
    for rule in RULES:
        columns = [np.array([cell.regret for cell in cells if (cell.rule, cell.host) == (rule, host)]) for host in HOST]
        lines.append(f"| {rule} | {' | '.join(f'{each.mean():.3f}, {each.max():.2f}' for each in columns)} |")
    return lines


def buckets(backwards: Sequence[Backward]) -> dict[str, Mapping[str, list[int]]]:
    """Return how many buckets each rule makes with 8 ranks, and how many bytes the largest one has, by model."""
    found = {rule: {each.model: each.planned(rule, 8, 0.0)[0].buckets for each in backwards} for rule in RULES}
    return {
        rule: {model: [len(made), max(bucket.nbytes for bucket in made)] for model, made in plans.items()}
        for rule, plans in found.items()
    }


def on_gpu(timeline: Timeline, seconds: float) -> Timeline:
    """Return a recorded backward as on a GPU, where it takes so long."""
    factor = seconds / timeline.backward_end
    specs = tuple(replace(spec, device="cuda:0") for spec in timeline.specs)
    return Timeline(specs, tuple(min(factor * ready, seconds) for ready in timeline.ready), seconds)


def of_7b() -> Timeline:
    """Return the backward of 7 B parameters in bfloat16: each gradient takes as long as it has elements."""
    specs = [ParamSpec(name, shape, "bfloat16", device="cuda:0") for name, shape in llama_7b()]
    work = np.array([0 if spec.name == "embed_tokens.weight" else spec.numel for spec in specs], dtype=float)
    ready = np.cumsum(work[::-1])[::-1] / work.sum()
    return Timeline(tuple(specs), tuple(map(float, 0.5 * ready)), 0.5)


def main() -> None:
    """Compute, print two tables, and write the record."""
    large = [Backward(name, on_gpu(load(name)[0], 0.05)) for name in MODELS if name not in SMALL]
    large.append(Backward("llama_7b", of_7b()))
    small = [
        Backward(f"{name}, {seconds * 1e3:.0f} ms", on_gpu(load(name)[0], seconds))
        for name, seconds in product(SMALL, (0.05, 0.01))
    ]
    record: dict[str, Any] = {"machine": describe(gpu=False)}
    for title, some in (("large models", large), ("small models", small)):
        cells = list(regrets(some))
        worst = [max((cell for cell in cells if cell.rule == rule), key=lambda cell: cell.regret) for rule in RULES]
        record[title] = {
            "models": [each.model for each in some],
            "table": table(cells),
            "worst": [cell._asdict() for cell in worst],
            "buckets": buckets(some),
        }
        print(f"{title}: {', '.join(record[title]['models'])}\n\n" + "\n".join(record[title]["table"]) + "\n")
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {RECORD.name}")


if __name__ == "__main__":
    main()
