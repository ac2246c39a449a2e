"""Prints a record as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.goals import Outcome
from bench.record import outcomes_of

__all__ = ["print_record"]


def print_record(record: Mapping[str, Any], console: Console | None = None) -> None:
    """Print all measurements, then every ratio with its goal."""
    console = console or Console(width=150)
    cases: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in record["measurements"]:
        cases.setdefault((row["suite"], row["case"]), []).append(row)
    for (suite, case), rows in cases.items():
        console.print(_measurements(suite, case, rows))
    console.print(_ratios(outcomes_of(record)))
    machine = record["machine"]
    commit = f"{machine['commit'] or 'unknown'}{' with changes' * bool(machine['uncommitted_changes'])}"
    console.print(
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, load {machine['load'][0]} at the start; "
        f"torch {machine['torch']}, commit {commit}"
    )
    for suite, facts in record["suites"].items():
        if not facts["passed"]:
            console.print(f"[bold red]{suite} failed or ran out of time[/]: {escape(facts['command'])}")
    console.print(f"goals met: {record['goals']['met']}, missed: {record['goals']['missed']}")
    if record["quick"]:
        console.print("[yellow]a quick run: it shows that everything runs; its numbers prove little[/]")


def _measurements(suite: str, case: str, rows: list[Mapping[str, Any]]) -> Table:
    table = Table(title=f"{suite}: {escape(case)}", title_justify="left")
    table.add_column("contender")
    for heading in ("median", "min", "iqr", "rounds"):
        table.add_column(heading, justify="right")
    steps, packs = ("extra" in rows[0]["info"], "bytes_per_second" in rows[0]["info"])
    own = ("over bare", "its range", "wall over bare") if steps else ("GB/s", "host") if packs else ()
    for heading in (*own, "operators", "launches"):
        table.add_column(heading, justify="right")
    for row in rows:
        info = row["info"]
        cells = [_time(row["median"]), _time(row["min"]), _time(row["iqr"]), str(row["rounds"])]
        if steps:
            span = f"{_time(info['extra_lowest'])} … {_time(info['extra_highest'])}"
            cells += [_time(info["extra"]), span, _time(info["extra_wall"])]
        elif packs:
            cells += [f"{info['bytes_per_second'] / 1e9:.1f}", _time(info["host"]) if "host" in info else ""]
        cells += [str(info.get("operators", "")), str(info.get("launches", ""))]
        table.add_row(escape(row["variant"]), *cells)
    return table


def _ratios(outcomes: list[Outcome]) -> Table:
    table = Table(title="ratios and goals", title_justify="left")
    table.add_column("case")
    table.add_column("what")
    for heading in ("value", "goal", ""):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        sign = "≥" if outcome.at_least else "≤"
        result = {True: "[green]met[/]", False: "[bold red]missed[/]", None: ""}[outcome.met]
        table.add_row(
            escape(f"{outcome.suite}: {outcome.case}"),
            escape(outcome.what),
            "not measurable" if outcome.value is None else f"{outcome.value:.3g}",
            "" if outcome.goal is None else f"{sign} {outcome.goal:.3g}",
            result,
        )
    return table


def _time(seconds: float) -> str:
    """Return the time in the unit that gives one to three digits before the point.

    Example:
        >>> from bench.table import _time
        >>> _time(0.00123), _time(-2e-7)
        ('1.23 ms', '-0.2 µs')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
