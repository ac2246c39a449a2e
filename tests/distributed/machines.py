"""Two machines for tests: network namespaces, joined by a cable. Linux only."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

from tests.distributed.processes import clean_environment

__all__ = ["Machines", "namespaces"]


class Machines:
    """Two places to start processes in.

    Args:
        kind: what they are, in words.
        addresses: one of each.
        entries: the command that leads into each.
        port: free on the first.
    """

    def __init__(self, kind: str, addresses: list[str], entries: list[list[str]], port: int) -> None:
        self.kind = kind
        self.addresses = addresses
        self.port = port
        self.entries = entries
        self._started: list[subprocess.Popen[str]] = []

    @property
    def apart(self) -> bool:
        return self.entries[0] != self.entries[1]

    def start(self, number: int, *command: object, **how: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self.entries[number], *map(str, command)],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **how,
        )
        self._started.append(process)
        return process

    def end_all(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        self._started.clear()

    def launch(self, number: int, *words: object) -> subprocess.Popen[str]:
        return self.start(number, sys.executable, "-m", "dpfuse.launch", *words)

    def way(self, number: int) -> list[str]:
        """The flags of Paddle's newer way."""
        return [f"--master={self.addresses[0]}:{self.port}", "--nnodes=2", f"--rank={number}"]


def namespaces(cleanup: ExitStack) -> Machines:
    """Two network namespaces, joined by a cable; they vanish with the two processes that hold them."""

    def hold(*command: str) -> int:
        # cat waits until its input ends, even if this process is killed.
        holder = subprocess.Popen(
            [*command, "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert holder.stdin
        assert holder.stdout
        assert holder.stderr
        cleanup.callback(holder.communicate)  # ends the input
        if holder.stdout.readline() != "ready\n":
            raise OSError(holder.stderr.read().strip())
        return holder.pid

    first = hold("unshare", "--user", "--map-root-user", "--net")
    inside = ["nsenter", "--target", str(first), "--user", "--preserve-credentials"]
    second = hold(*inside, "unshare", "--net")
    entries = [[*inside, f"--net=/proc/{pid}/ns/net"] for pid in (first, second)]
    addresses = ["192.168.1.2", "192.168.1.3"]
    steps = [(0, f"link add cable0 type veth peer name cable1 netns {second}")]
    for number, address in enumerate(addresses):
        cable = f"cable{number}"
        steps += [(number, "link set lo up"), (number, f"addr add {address}/24 dev {cable}")]
        steps += [(number, f"link set {cable} up")]
    for number, step in steps:
        command = [*entries[number], "ip", *step.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if done.returncode:
            raise OSError(done.stderr.strip())
    return Machines("two network namespaces", addresses, entries, 29500)
