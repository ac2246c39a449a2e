"""`python -m bench.regret`: how much later steps end by simple rules for buckets than by the best plan, as tables.

A rule knows the order of gradients, their sizes and the number of ranks, but no times. The exact planner knows all.
Both are compared on recorded backwards, at loads of 1/8 to 4: at load 1 the network needs as long for the bytes as
backward takes. Each bucket also pays the start-up time of a collective: of gloo, NVLink, InfiniBand and Ethernet, from
2 to 16,384 ranks. The regret is the end of the step (backward and all communication), divided by that of the best
plan. Nothing is measured: `dpfuse.tune.simulate` computes every end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.machine import describe
from bench.record_timeline import MODELS, load
from dpfuse.engine.plan import MB, BucketPlan, assign_buckets
from dpfuse.engine.ramp import Ramp, ramp_limits
from dpfuse.model.plan_from_groups import plan_from_groups
from dpfuse.tune import ETHERNET, INFINIBAND, NVLINK, CostTable, Timeline, optimal_plan, simulate
from dpfuse.tune.link import Link
from dpfuse.tune.published_plans import capped_plan, ddp_plan, paddle_plan, ramp_plan
from dpfuse.tune.scaling import on_gpu as scaled_on_gpu

SMALL = ("tiny_2000", "layers_300")
RECORD = Path(__file__).parent / "results" / "regret.json"
BACKWARD = 0.05  # seconds; a few hundred MB of parameters take about as long on a GPU
LOADS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)


def _presets(links: Iterable[Link], ranks: int) -> dict[str, tuple[int, float]]:
    return {f"{link.name} {ranks}": (ranks, link.cost(ranks)(0.0)) for link in links}


# Groups of networks, each with its number of ranks and the seconds that a collective of few bytes takes.
NETWORKS: dict[str, dict[str, tuple[int, float]]] = {
    "2 to 8 ranks": {
        "shared memory": (2, 20e-6),
        "two servers, TCP": (2, 150e-6),
        "eight servers, slow TCP": (8, 500e-6),
        **_presets([NVLINK], 8),
    },
    "16, 64": {**_presets([NVLINK, INFINIBAND, ETHERNET], 16), **_presets([NVLINK, INFINIBAND, ETHERNET], 64)},
    "256, 1024": {**_presets([INFINIBAND, ETHERNET], 256), **_presets([INFINIBAND, ETHERNET], 1024)},
    "4096, 16384": {**_presets([INFINIBAND, ETHERNET], 4096), **_presets([INFINIBAND, ETHERNET], 16384)},
}
Rule = Callable[[Timeline, int], BucketPlan]  # of a backward and a number of ranks


def _default(timeline: Timeline, ranks: int) -> BucketPlan:
    return ramp_plan(timeline, ranks=ranks)


def _ramp(timeline: Timeline, ranks: int, ramp: Ramp) -> BucketPlan:
    limits = ramp_limits(sum(timeline.nbytes), 25 * MB, MB, ranks, ramp)
    groups = assign_buckets(timeline.specs, limits, timeline.order[::-1])[::-1]
    return plan_from_groups(timeline.specs, [group.members for group in groups])


def _equal_parts(timeline: Timeline, ranks: int, count: int) -> BucketPlan:
    return capped_plan(timeline, sum(timeline.nbytes) / count / MB)


RULES: dict[str, Rule] = {
    'dpfuse, plan="ramp" (default)': _default,
    'Paddle 25 + 1 MB, dpfuse plan="greedy"': lambda timeline, ranks: paddle_plan(timeline),
    "torch's DDP, 1 + 25 MB": lambda timeline, ranks: ddp_plan(timeline),
    "eight equal buckets": partial(_equal_parts, count=8),
    "one bucket": partial(_equal_parts, count=1),
    **{
        f"ramp with {name}": partial(_ramp, ramp=other)
        for name, other in {
            "4 parts": Ramp(parts=4),
            "16 parts": Ramp(parts=16),
            "ends of 1/2": Ramp(end=2),
            "ends of 1/8": Ramp(end=8),
            "ends of 1/16, factor 4": Ramp(end=16, growth=4),
            "256 KB at least": Ramp(least=MB // 4),
            "4 MB at least": Ramp(least=4 * MB),
            "a least that does not grow": Ramp(ranks=1 << 30),
            "a least that grows from 64 ranks on": Ramp(ranks=64),
        }.items()
    },
}


class Cell(NamedTuple):
    """The regret of a rule in one place."""

    rule: str
    model: str
    network: str
    load: float
    regret: float


def regrets(networks: Mapping[str, tuple[int, float]], backwards: Mapping[str, Timeline]) -> Iterator[Cell]:
    """Yield the regret of each rule, for each backward at each load of each network."""
    for (network, (ranks, latency)), (model, timeline) in product(networks.items(), backwards.items()):
        for share in LOADS:
            cost = CostTable.affine(latency, sum(timeline.nbytes) / (share * timeline.backward_end))
            best = simulate(timeline, optimal_plan(timeline, cost), cost).end
            for rule, plan in RULES.items():
                regret = simulate(timeline, plan(timeline, ranks), cost).end / best
                yield Cell(rule, model, network, share, round(regret, 4))


def table(found: Mapping[str, Sequence[Cell]]) -> str:
    """Return the mean and the worst regret of each rule, as Markdown."""
    lines = [f"| rule | {' | '.join(found)} |", "|---|" + "---|" * len(found)]
    for rule in RULES:
        columns = [np.array([cell.regret for cell in cells if cell.rule == rule]) for cells in found.values()]
        lines.append(f"| {rule} | {' | '.join(f'{each.mean():.3f}, {each.max():.2f}' for each in columns)} |")
    return "\n".join(lines)


def main() -> None:
    """Compute, print two tables, and write the record."""
    backwards = {name: on_gpu(load(name)[0]) for name in MODELS}
    small = {name: backwards.pop(name) for name in SMALL}
    record: dict[str, Any] = {"machine": describe(gpu=False)}
    for title, some in (("large models", backwards), ("small models", small)):
        found = {size: list(regrets(networks, some)) for size, networks in NETWORKS.items()}
        cells = [cell for cells in found.values() for cell in cells]
        worst = [max((cell for cell in cells if cell.rule == rule), key=lambda cell: cell.regret) for rule in RULES]
        record[title] = {
            "models": list(some),
            "table": table(found).splitlines(),
            "worst": [cell._asdict() for cell in worst],
        }
        print(f"{title}: {', '.join(some)}\n\n{table(found)}\n")
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {RECORD.name}")


def on_gpu(timeline: Timeline) -> Timeline:
    """Return the backward as on a GPU, in `BACKWARD` seconds."""
    return scaled_on_gpu(timeline, BACKWARD)


if __name__ == "__main__":
    main()
