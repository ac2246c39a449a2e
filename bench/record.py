"""The record of one run: makes one JSON file with medians, ratios and goals from pytest-benchmark's reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.goals import Entry, Outcome, judge

__all__ = ["FORMAT", "entries_of", "make_record", "outcomes_of", "seconds_before", "write_record"]

FORMAT = 1
DIGITS = 4  # of a number; no measurement here is more precise


def entries_of(report: Mapping[str, Any]) -> list[Entry]:
    """Return the measurements in one report of `pytest --benchmark-json`, without the single rounds."""
    entries = []
    for benchmark in report["benchmarks"]:
        stats, info = benchmark["stats"], dict(benchmark["extra_info"])
        suite, case, variant = (info.pop(key) for key in ("suite", "case", "variant"))
        median, least, iqr, rounds = (stats[key] for key in ("median", "min", "iqr", "rounds"))
        entries.append(Entry(suite, case, variant, median, least, iqr, rounds, info))
    return entries


def make_record(
    entries: Sequence[Entry],
    *,
    name: str,
    date: str,
    quick: bool,
    machine: Mapping[str, Any],
    command: str,
    suites: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the record of a run.

    Args:
        entries: the measurements.
        name: of the record, without suffix.
        date: begin of the run, ISO 8601.
        quick: whether it was a short run; its numbers prove little.
        machine: from `bench.machine.describe`.
        command: the command that reproduces it.
        suites: per suite its `command`, `seconds` and `passed`.
    """
    outcomes = judge(entries)
    return {
        "format": FORMAT,
        "name": name,
        "date": date,
        "quick": quick,
        "command": command,
        "machine": dict(machine),
        "suites": {suite: dict(facts) for suite, facts in suites.items()},
        "goals": {
            "met": sum(outcome.met is True for outcome in outcomes),
            "missed": sum(outcome.met is False for outcome in outcomes),
        },
        "ratios": [asdict(outcome) | {"met": outcome.met} for outcome in outcomes],
        "measurements": [asdict(entry) for entry in entries],
    }


def outcomes_of(record: Mapping[str, Any]) -> list[Outcome]:
    """Return the ratios of a record with their goals."""
    return [Outcome(**{key: row[key] for key in row if key != "met"}) for row in record["ratios"]]


def seconds_before(results: Path, machine: str, *, quick: bool) -> dict[str, float]:
    """Return how long each suite took when it last passed on such a machine.

    Args:
        results: the folder of the records.
        machine: how the names of its records begin.
        quick: whether to look at short runs.
    """
    found = [json.loads(path.read_text()) for path in results.glob(f"{machine}-*.json")]
    records = [record for record in found if record.get("quick") is quick and "suites" in record]
    return {
        suite: facts["seconds"]
        for record in sorted(records, key=lambda record: record["date"])
        for suite, facts in record["suites"].items()
        if facts["passed"]
    }


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Write the record as JSON, with one line per measurement and ratio, so that records can be compared by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in record.items() if key not in ("ratios", "measurements")}
    text = json.dumps(_rounded(head), indent=1).removesuffix("\n}")
    text += "".join(f',\n "{key}": [\n{_lines(record[key])}\n ]' for key in ("ratios", "measurements"))
    path.write_text(text + "\n}\n")


def _lines(rows: Iterable[Any]) -> str:
    return ",\n".join("  " + json.dumps(_rounded(row)) for row in rows)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        # JSON has no infinity and no NaN.
        return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
