"""`python -m bench.published_scaling`: predicts published scaling tables by the model of `dpfuse tune --simulate`.

A table gives the speed of its first row, mostly one GPU, and the network. From these, `dpfuse.tune` predicts the other
rows, and each gets an error. Nothing is fitted to a table. The record is `bench/results/published_scaling.json`, and
`docs/measurements/scale.md` shows its tables between markers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.machine import ROOT, describe
from bench.published_models import timeline_of
from bench.published_tables import DLPERF, SERIES, SOURCES, UNUSED, Series
from bench.record_timeline import load
from dpfuse.engine.plan import MB, BucketPlan
from dpfuse.tune import (
    ALGORITHMS,
    INSIDE,
    NETWORKS,
    Cluster,
    ScaledStep,
    Timeline,
    break_even,
    capped_plan,
    ddp_plan,
    scale,
    simulate,
    single_plan,
)
from dpfuse.tune.scaling import BACKWARD_SHARE, BEST, DPFUSE, on_gpu

__all__ = ["BUCKETS", "Row", "main", "predict"]

RECORD = ROOT / "bench" / "results" / "published_scaling.json"
PAGE = ROOT / "docs" / "measurements" / "scale.md"
HALF = [series for series in SERIES if series.table == DLPERF and series.wire == "float16"]
LARGE = ("resnet50", "bert_large", "gpt2", "vit_large")
STEP = 0.075  # seconds: a backward of 50 ms, as in bench.regret
PLACES = (
    ("nvlink-4", "infiniband-ndr"),
    ("nvlink-3", "efa-p4d"),
    ("pcie-4", "ethernet-25"),
)  # inside a node, between nodes
HALVINGS = 60  # of an interval: below the precision of a float
ELEMENT = 4  # bytes of the gradients whose plan is made

BUCKETS: dict[str, Callable[[Timeline], BucketPlan]] = {
    "torch DDP": ddp_plan,
    "Horovod, 64 MB": lambda timeline: capped_plan(timeline, 64),
    "apex, 10 M": lambda timeline: capped_plan(timeline, 10e6 * ELEMENT / MB),
    "apex, 250 M": lambda timeline: capped_plan(timeline, 250e6 * ELEMENT / MB),
    "each gradient": single_plan,
}
"""How the software of a table cuts gradients, by default: MB of torch and Horovod, million elements of apex."""


class Row(NamedTuple):
    """A published throughput, in samples per second of all ranks together, and the predicted one."""

    table: str
    series: str
    ranks: int
    published: float
    predicted: float
    error: float  # of the prediction, as a part of the published number


class _Forecast:
    """Predicts the step of one series at any number of ranks."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._timeline = replace(timeline_of(series.model), wire_dtype=series.wire)
        self._plan = BUCKETS[series.buckets](on_gpu(self._timeline, 1.0))  # time does not change it
        self._cost = cache(series.cluster.cost)

    def seconds(self, compute: float, ranks: int) -> float:
        """Return the seconds of a step which takes `compute` without communication."""
        backward = BACKWARD_SHARE * compute
        timeline = on_gpu(self._timeline, backward)
        costs = (self._cost(ranks, algorithm) for algorithm in self._series.algorithms)
        return compute + min(simulate(timeline, self._plan, cost).exposed for cost in costs)

    def compute(self, step: float, ranks: int) -> float:
        """Return the seconds without communication of a step that takes `step` at so many ranks."""
        low, high = 0.0, step
        for _ in range(HALVINGS if ranks > 1 else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if self.seconds(middle, ranks) <= step else (low, middle)
        return high


def predict(series: Series) -> list[Row]:
    """Predict all rows of a series but the first, from the first."""
    forecast = _Forecast(series)
    (base, rate), *others = series.rows
    compute = forecast.compute(base * series.batch / rate, base)
    rows = []
    for ranks, published in others:
        predicted = ranks * series.batch / forecast.seconds(compute, ranks)
        rows.append(
            Row(series.table, series.name, ranks, published, round(predicted, 2), round(predicted / published - 1, 4))
        )
    return rows


def summary(rows: Iterable[Row]) -> list[str]:
    """Return the errors of each table as Markdown: number of rows, mean of the absolute errors, worst row."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.table, []).append(row)
    lines = [
        "| Table | Rows | Mean of the absolute errors | Mean error | Worst row | Its error |",
        "|---|---|---|---|---|---|",
    ]
    for table, some in found.items():
        errors = np.array([row.error for row in some])
        worst = max(some, key=lambda row: abs(row.error))
        lines.append(
            f"| {table} | {len(some)} | {np.abs(errors).mean():.1%} | {errors.mean():+.1%} | {worst.series}, "
            f"{worst.ranks} ranks | {worst.error:+.1%} |"
        )
    return lines


def details(rows: Iterable[Row]) -> list[str]:
    """Return each row of each series as Markdown, by ranks: published samples per second, and error."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        found.setdefault((row.table, row.series), []).append(f"{row.ranks}: {row.published:,.0f}, {row.error:+.1%}")
    lines = ["| Table | Series | Ranks: published samples per second, error of the prediction |", "|---|---|---|"]
    return lines + [f"| {table} | {series} | {'; '.join(cells)} |" for (table, series), cells in found.items()]


def connections() -> list[str]:
    """Return the table of connections as Markdown."""
    lines = ["| Name | GB/s, one direction | Cards per node | µs per hop | Source |", "|---|---|---|---|---|"]
    for connection in (*INSIDE.values(), *NETWORKS.values()):
        cards = str(connection.cards) if connection.name in NETWORKS else ""
        lines.append(
            f"| `{connection.name}` | {connection.bandwidth / 1e9:g} | {cards} | {connection.latency * 1e6:g} | "
            f"{connection.source} |"
        )
    return lines


def sources() -> list[str]:
    """Return the sources of the published tables as Markdown."""
    return ["| Table | Source |", "|---|---|", *(f"| {table} | {source} |" for table, source in SOURCES.items())]


def break_evens() -> list[str]:
    """Return as Markdown from which number of ranks the best plan, and dpfuse's default, save 1 % of DDP's step.

    The step takes `STEP` seconds without communication.
    """
    lines = [f"| Network, all-reduce | {' | '.join(LARGE)} |", "|---|" + "---|" * len(LARGE)]
    for inside, network in PLACES:
        cluster = Cluster(INSIDE[inside], NETWORKS[network])
        for algorithm in ALGORITHMS:
            cells = [_cell(scale(load(name)[0], cluster, algorithm=algorithm, compute=STEP)) for name in LARGE]
            lines.append(f"| {network}, {algorithm} | {' | '.join(cells)} |")
    return lines


def _cell(steps: list[ScaledStep]) -> str:
    least = min(steps, key=lambda step: step.saved(DPFUSE))
    ranks = [str(break_even(steps, plan) or "none") for plan in (BEST, DPFUSE)]
    return f"{', '.join(ranks)}, {least.saved(DPFUSE):+.0%} at {least.ranks}".replace("-0%", "+0%")


def compute() -> dict[str, Any]:
    """Return the record without the machine."""
    rows = [row for series in SERIES for row in predict(series)]
    return {
        "tables": {
            "connections": connections(),
            "sources": sources(),
            "summary": summary(rows),
            "details": details(rows),
            "unused": [f"- {reason}." for reason in UNUSED],
            "break-even": break_evens(),
        },
        "rows": [row._asdict() for row in rows],
        "as_float32": [row._asdict() for series in HALF for row in predict(series._replace(wire="float32"))],
    }


def fill(page: str, tables: dict[str, list[str]]) -> str:
    """Return the page with each table between its two markers, `<!-- name -->` and `<!-- end -->`.

    Example:
        >>> fill("<!-- a -->\\nold\\n<!-- end -->", {"a": ["new"]})
        '<!-- a -->\\n\\nnew\\n\\n<!-- end -->'
    """
    for name, lines in tables.items():
        before, marker, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (marker and end):
            raise ValueError(f"the page has no <!-- {name} --> with an <!-- end --> after it; expected both markers")
        page = "\n".join([f"{before}{marker}", *lines, f"\n{end}{after}"])
    return page


def main(record: Path = RECORD, page: Path = PAGE) -> None:
    """Compute, print the summary, and write the record and the tables of the page."""
    found = compute()
    print("\n".join([*found["tables"]["summary"], "", *found["tables"]["details"]]))
    record.write_text(json.dumps({"machine": describe(gpu=False), **found}, indent=1) + "\n", encoding="utf-8")
    page.write_text(fill(page.read_text(encoding="utf-8"), found["tables"]), encoding="utf-8")
    print(f"record: {record.name}")


if __name__ == "__main__":
    main()
