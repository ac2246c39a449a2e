"""What can happen to the cable between two machines."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from tests.distributed.machines import Machines

__all__ = ["CABLES"]

BLIP = 5.0  # seconds
NOBODY = "02:00:00:00:00:99"  # a hardware address that no machine has: what is sent there is dropped


def down(machines: Machines) -> None:
    """The second machine's end is switched off: it knows, the other does not."""
    run(machines, 1, "link set cable1 down")


def vanishes(machines: Machines) -> None:
    """Nothing arrives any more, and nobody is told."""
    for number, other in enumerate(reversed(machines.addresses)):
        run(machines, number, f"neigh replace {other} lladdr {NOBODY} nud permanent dev cable{number}")


def blip(machines: Machines) -> None:
    """Nothing arrives for some seconds."""
    vanishes(machines)
    time.sleep(BLIP)
    for number, other in enumerate(reversed(machines.addresses)):
        run(machines, number, f"neigh del {other} dev cable{number}")


def run(machines: Machines, number: int, step: str) -> None:
    """A command of iproute2 on one of the machines."""
    subprocess.run([*machines.entries[number], "ip", *step.split()], check=True, timeout=10)


CABLES: dict[str, Callable[[Machines], None]] = {"down": down, "vanishes": vanishes, "blip": blip}
