"""Fresh processes for tests, and what the kernel knows about them: which ones live and listen. Linux only."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.patience import patience
from tests.warm import warm_python

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
# Variables that would make a fresh process join a job.
JOB_VARIABLES = re.compile(r"^(RANK|WORLD_SIZE|LOCAL_|MASTER_|PADDLE_|FLAGS_|TORCHELASTIC_|DPFUSE_|OMP_NUM|GLOO_|PET_)")


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without any job and without GPUs, plus `variables`."""
    kept = {name: value for name, value in os.environ.items() if not JOB_VARIABLES.match(name)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **variables}


def python(warm: bool) -> str:
    """Return the command that starts Python: a fork that has imported torch already, or an interpreter of its own."""
    return warm_python() if warm else sys.executable


def start(*arguments: object, warm: bool = False, **variables: str) -> subprocess.Popen[str]:
    """Start Python. A warm one must not be asked for its process id: it belongs to the program that stands for it."""
    return subprocess.Popen(
        [python(warm), *map(str, arguments)],
        env=clean_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_signals,
    )


def _hear_signals() -> None:
    """Ignore no signal: what a shell starts in the background ignores Ctrl-C, under `nohup` SIGHUP, and so do forks."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run(
    *arguments: object,
    timeout: float = 120,
    warm: bool = True,
    warm_ranks: bool = False,
    folder: Path | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python. Ranks that it starts are warm only if it is said: they have other ids than their parent knows."""
    if warm_ranks:
        variables["PYTHON_EXEC"] = python(warm=True)
    return subprocess.run(
        [python(warm), *map(str, arguments)],
        cwd=folder,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=patience(timeout),
    )


def launch(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run the launcher; `how` is as for `run`."""
    return run("-m", "dpfuse.launch", *arguments, **how)


def shell(command: str, folder: Path, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command line as it stands in a document; `python` is this one, warm, and so are the ranks it starts."""
    return subprocess.run(
        ["sh", "-c", with_this_python(command, warm=True)],
        cwd=folder,
        env=clean_environment(PYTHON_EXEC=python(warm=True), **variables),
        capture_output=True,
        text=True,
        timeout=patience(timeout),
    )


def with_this_python(command: str, *, warm: bool = False) -> str:
    return f'python() {{ {shlex.quote(python(warm))} "$@"; }}\n{command}'


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def pids_in(text: str) -> list[int]:
    """The process ids that the test scripts print."""
    return [int(pid) for pid in re.findall(r"\bpid=(\d+)", text)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def all_gone(pids: Iterable[int], within: float) -> bool:
    began = time.monotonic()
    pids = list(pids)
    while any(map(alive, pids)) and time.monotonic() < began + patience(within):
        time.sleep(0.05)
    return not any(map(alive, pids))


def family(pid: int) -> list[int]:
    """A process and everything below it."""
    members = [pid]
    for member in members:
        for task in Path(f"/proc/{member}/task").glob("*/children"):
            members += [int(child) for child in task.read_text().split()]
    return members


def listening_addresses(pids: Iterable[int]) -> list[str]:
    """The address of every TCP socket on which one of the processes listens."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
            except FileNotFoundError:
                continue
            if found:
                inodes.add(found[1])
    addresses = []
    for table, family_of_table in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])
                # The kernel prints each 32-bit word in its own byte order.
                order = -1 if sys.byteorder == "little" else 1
                packed = b"".join(words[i : i + 4][::order] for i in range(0, len(words), 4))
                addresses.append(socket.inet_ntop(family_of_table, packed))
    return addresses


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback
