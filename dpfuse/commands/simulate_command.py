"""`dpfuse tune --simulate`: predict steps at other numbers of ranks from one recorded backward, and report them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from dpfuse.commands.machine import machine_facts, software_versions
from dpfuse.commands.report_file import SavedRun, size_of, write_report
from dpfuse.commands.report_folder import make_folder
from dpfuse.errors import DPFuseError
from dpfuse.tune import ALGORITHMS, INSIDE, NETWORKS, Cluster, Connection, ScaledStep, Timeline, scale, scale_text
from dpfuse.tune.scaling import BEST, DDP, DPFUSE, break_even

__all__ = ["Scaling", "load_timeline", "report_scaling", "simulate_file"]

SIMULATION = "simulation.json"  # beside the report of `dpfuse tune`, which may be the input


@dataclass(frozen=True)
class Scaling:
    """The wishes of the command line.

    Args:
        inside: name of the connection inside a node.
        link: name of the network between nodes.
        gpus_per_node: ranks of a full node.
        cards_per_node: network cards of a node; None takes the usual number.
        ranks: numbers of ranks.
        compute: seconds of a step without communication; None takes 1.5 times the recorded backward.
        caps: limits of a bucket of the best plan, and of its last one, in MB.
    """

    inside: str
    link: str
    gpus_per_node: int
    cards_per_node: int | None
    ranks: tuple[int, ...]
    compute: float | None
    caps: tuple[float, float]

    def cluster(self) -> Cluster:
        """Return the cluster.

        Raises:
            DPFuseError: a name is unknown, or a number of ranks does not fill its nodes.
        """
        found = Cluster(
            _named("inside", self.inside, INSIDE),
            _named("link", self.link, NETWORKS),
            self.gpus_per_node,
            self.cards_per_node,
        )
        try:
            for count in self.ranks:
                found.nodes(count)
        except ValueError as error:
            raise DPFuseError(f"--ranks: {error}, or another --gpus_per_node") from error
        return found


def simulate_file(path: Path, scaling: Scaling, folder: Path, arguments: list[str]) -> int:
    """Simulate the backward in a file, print and write.

    Raises:
        DPFuseError: the file has no timeline, a wish is not possible, or the folder cannot be made.
    """
    scaling.cluster()
    timeline = load_timeline(path)
    make_folder(folder)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    run = SavedRun(now, 0, "none", machine_facts(torch.device("cpu")), software_versions())
    report_scaling(timeline, scaling, str(path), run, folder, arguments)
    return 0


def load_timeline(path: Path) -> Timeline:
    """Return the timeline in a JSON file of `Timeline.save`, `dpfuse tune` or `bench.record_timeline`.

    Raises:
        DPFuseError: there is no such file, or it has something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Timeline.from_json(found["timeline"] if isinstance(found, dict) and "timeline" in found else found)
    except OSError as error:
        hint = "; to record a model, put module:factory before --simulate" if ":" in str(path) else ""
        raise DPFuseError(
            f"--simulate: cannot read {str(path)!r}: {error.strerror}; expected a timeline file{hint}"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise DPFuseError(
            f"--simulate: {str(path)!r} has no timeline: {error}; expected the report.json of `dpfuse tune`, or a file "
            "of Timeline.save"
        ) from error


def report_scaling(
    timeline: Timeline, scaling: Scaling, place: str, run: SavedRun, folder: Path, arguments: list[str]
) -> None:
    """Simulate, print a table per algorithm, and write the report.

    Raises:
        DPFuseError: a wish is not possible.
    """
    cluster = scaling.cluster()
    found = {
        name: scale(
            timeline,
            cluster,
            scaling.ranks,
            algorithm=name,
            compute=scaling.compute,
            comm_buffer_size=scaling.caps[0],
            last_comm_buffer_size=scaling.caps[1],
        )
        for name in ALGORITHMS
    }
    print(_heading(timeline, cluster, place, next(iter(found.values()))[0].compute))
    for name, steps in found.items():
        print(f"\n{name}; ms\n{scale_text(steps)}")
    facts: dict[str, Any] = {
        "cluster": {
            "inside": asdict(cluster.inside),
            "network": asdict(cluster.network),
            "gpus_per_node": cluster.ranks_per_node,
            "cards_per_node": cluster.cards or cluster.network.cards,
        },
        "comm_buffer_size": size_of(scaling.caps[0]),
        "last_comm_buffer_size": size_of(scaling.caps[1]),
        "algorithms": {
            name: {
                "steps": [_facts(step) for step in steps],
                "break_even": {plan: break_even(steps, plan) for plan in (BEST, DPFUSE)},
            }
            for name, steps in found.items()
        },
        "timeline": timeline.to_json(),
    }
    write_report(folder / SIMULATION, "simulate", arguments, place, run, facts)
    print(f"\nreport: {folder / SIMULATION}")


def _heading(timeline: Timeline, cluster: Cluster, place: str, compute: float) -> str:
    cards = cluster.cards or cluster.network.cards
    return (
        f"{place}: {len(timeline.specs)} gradients, {sum(timeline.nbytes) / 1e6:.1f} million bytes; a step without "
        f"communication takes {compute * 1e3:.3f} ms\n"
        f"inside a node: {cluster.ranks_per_node} GPUs, {_connection_text(cluster.inside)}\n"
        f"between nodes: {cards} x {_connection_text(cluster.network)}"
    )


def _connection_text(connection: Connection) -> str:
    return (
        f"{connection.name}, {connection.bandwidth / 1e9:g} GB/s, {connection.latency * 1e6:g} µs ({connection.source})"
    )


def _facts(step: ScaledStep) -> dict[str, Any]:
    return {
        "ranks": step.ranks,
        "compute": step.compute,
        "plans": {
            plan: {
                "step": step.seconds(plan),
                "exposed": step.exposed[plan],
                "efficiency": step.efficiency(plan),
                "buckets": step.buckets[plan],
            }
            for plan in (BEST, DPFUSE, DDP)
        },
    }


def _named(flag: str, name: str, table: Mapping[str, Connection]) -> Connection:
    if name not in table:
        close = difflib.get_close_matches(name, table, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DPFuseError(f"--{flag}: got {name!r}, expected one of {', '.join(table)}{hint}")
    return table[name]
