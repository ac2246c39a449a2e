"""Network namespaces on one bridge, one for each rank, as if each rank were on a machine of its own. Linux only."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack

__all__ = ["CARD", "limit_sending", "namespaces"]

CARD = "card0"  # the interface of each rank


def namespaces(count: int, cleanup: ExitStack) -> list[list[str]]:
    """Return the command that leads into each namespace. They vanish with the processes that hold them.

    Raises:
        OSError: this machine makes none.
    """

    def hold(*command: str) -> int:
        # cat waits until its input ends, even if this process is killed.
        holder = subprocess.Popen(
            [*command, "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        cleanup.callback(holder.communicate)  # ends the input
        if not holder.stdout or not holder.stderr or holder.stdout.readline() != "ready\n":
            raise OSError(holder.stderr.read().strip() if holder.stderr else "no answer")
        return holder.pid

    def entry(pid: int) -> list[str]:
        return [*inside, f"--net=/proc/{pid}/ns/net"]

    hub = hold("unshare", "--user", "--map-root-user", "--net")
    inside = ["nsenter", "--target", str(hub), "--user", "--preserve-credentials"]
    ranks = [hold(*inside, "unshare", "--net") for _ in range(count)]
    steps = [(hub, "link add bridge0 type bridge"), (hub, "link set bridge0 up")]
    for number, pid in enumerate(ranks):
        steps += [
            (hub, f"link add port{number} type veth peer name {CARD} netns {pid}"),
            (hub, f"link set port{number} master bridge0 up"),
            (pid, "link set lo up"),
            (pid, f"addr add 192.168.7.{number + 1}/24 dev {CARD}"),
            (pid, f"link set {CARD} up"),
        ]
    for pid, step in steps:
        done = subprocess.run([*entry(pid), "ip", *step.split()], capture_output=True, text=True, timeout=10)
        if done.returncode:
            raise OSError(done.stderr.strip())
    return [entry(pid) for pid in ranks]


def limit_sending(bytes_per_second: float | None) -> None:
    """Limit what leaves through the interface of this process's namespace; None ends that."""
    if bytes_per_second is None:
        words = f"qdisc del dev {CARD} root"
    else:
        words = f"qdisc add dev {CARD} root tbf rate {int(8 * bytes_per_second)} burst 64kb latency 400ms"
    subprocess.run(["tc", *words.split()], check=True, capture_output=True, timeout=10)
