"""Two machines, for real: two network namespaces with the addresses of Paddle's documents, each with a launcher.

Where namespaces cannot be made, two launchers meet on loopback instead. Every test prints which of the two it was.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.distributed.machines import Machines, namespaces
from tests.distributed.processes import SCRIPTS, all_gone, free_port, pids_in, with_this_python
from tests.paddle.test_launch_commands import CLUSTER_NODE_IPS, IPS
from tests.patience import patience

pytestmark = pytest.mark.timeout(120)

TIMEOUT = 60


@pytest.fixture(scope="module")
def _machines() -> Iterator[Machines]:
    with ExitStack() as cleanup:
        try:
            made = namespaces(cleanup)
        except (OSError, subprocess.SubprocessError) as error:
            kind = f"two launchers on loopback, since namespaces cannot be made here ({error})"
            made = Machines(kind, ["127.0.0.1", "127.0.0.2"], [[], []], free_port())
        yield made


@pytest.fixture
def machines(_machines, record_property):
    record_property("two_nodes", _machines.kind)
    print(f"two nodes: {_machines.kind}")
    yield _machines
    _machines.end_all()


@pytest.fixture
def folder(tmp_path):
    shutil.copy(SCRIPTS / "train.py", tmp_path / "train_with_fleet.py")
    return tmp_path


def finish(nodes):
    """What the two launchers printed; both must end well."""
    told = [node.communicate(timeout=patience(TIMEOUT)) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    return told


def reports(told):
    seen = [[json.loads(line) for line in out.splitlines()] for out, _ in told]
    return [sorted(node, key=lambda s: s["rank"]) for node in seen]


def run_in_shells(machines, folder, commands):
    nodes = []
    for number, command in enumerate(commands):
        words = with_this_python(command.replace("paddle.distributed.launch", "dpfuse.launch"))
        nodes.append(machines.start(number, "sh", "-c", words, cwd=folder))
    return finish(nodes)


def heard(machines, number, pid):
    """The addresses on which a process of that machine listens."""
    script = f"import json; from tests.distributed.processes import *; print(json.dumps(listening_addresses([{pid}])))"
    return json.loads(machines.start(number, sys.executable, "-c", script).communicate(timeout=patience(TIMEOUT))[0])


def check(machines, told, per_node, port):
    """Ranks are numbered through the nodes in the order of the list, and each knows its place."""
    size = 2 * per_node
    endpoints = [f"{host}:{port + number}" for host in machines.addresses for number in range(per_node)]
    for node, seen in enumerate(reports(told)):
        assert [s["rank"] for s in seen] == list(range(node * per_node, (node + 1) * per_node))
        for local_rank, s in enumerate(seen):
            assert (s["world_size"], s["sum"]) == (size, size * (size + 1) / 2)
            assert s["endpoints"] == endpoints
            assert s["endpoint"] == endpoints[s["rank"]]
            assert s["paddle"] == {
                "PADDLE_TRAINER_ID": str(s["rank"]),
                "PADDLE_TRAINERS_NUM": str(size),
                "PADDLE_CURRENT_ENDPOINT": s["endpoint"],
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                "PADDLE_MASTER": endpoints[0],
                "PADDLE_GLOBAL_RANK": str(s["rank"]),
                "PADDLE_GLOBAL_SIZE": str(size),
                "PADDLE_LOCAL_RANK": str(local_rank),
                "PADDLE_LOCAL_SIZE": str(per_node),
                "PADDLE_NNODES": "2",
                "PADDLE_RANK_IN_NODE": str(local_rank),
                "PADDLE_DISTRI_BACKEND": "gloo",
            }
            assert s["interface"] == (f"cable{node}" if machines.apart else "lo")


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 4])
def test_the_documents_command_with_ips(machines, folder, per_node):
    if not machines.apart:
        pytest.skip(f"each machine must have addresses of its own; {machines.kind}")
    command = IPS if per_node == 4 else IPS.replace("--gpus=0,1,2,3", "--gpus=0")
    told = run_in_shells(machines, folder, [command, command])
    check(machines, told, per_node, port=6170)


@pytest.mark.slow
def test_the_documents_command_with_cluster_node_ips(machines, folder):
    if machines.apart:
        commands = [CLUSTER_NODE_IPS, CLUSTER_NODE_IPS.replace("node_ip=192.168.1.2", "node_ip=192.168.1.3")]
        port, per_node = 6170, 4
    else:
        port, per_node = free_port(), 2
        listed = ",".join(machines.addresses)
        flags = f"--cluster_node_ips={listed} --started_port={port} --selected_gpus=0,1"
        commands = [
            f"python -m paddle.distributed.launch {flags} --node_ip={own} train_with_fleet.py"
            for own in machines.addresses
        ]
    check(machines, run_in_shells(machines, folder, commands), per_node, port)


@pytest.mark.slow
def test_machines_meet_at_the_master_with_ranks_given(machines):
    nodes = [machines.launch(number, *machines.way(number), SCRIPTS / "train.py") for number in (0, 1)]
    for node, seen in enumerate(reports(finish(nodes))):
        (s,) = seen
        assert (s["rank"], s["sum"]) == (node, 3.0)
        assert s["paddle"]["PADDLE_MASTER"] == f"{machines.addresses[0]}:{machines.port}"
        assert s["interface"] == (f"cable{node}" if machines.apart else "lo")
        # Only a rank's own address is known to its launcher.
        assert s["endpoints"] == []
        own = machines.addresses[node] if machines.apart else machines.addresses[0]
        assert s["endpoint"] == f"{own}:{machines.port}"


@pytest.mark.slow
def test_machines_without_ranks_number_themselves(machines):
    flags = [f"--master={machines.addresses[0]}:{machines.port}", "--nnodes=2", "--nproc_per_node=2"]
    nodes = [machines.launch(number, *flags, SCRIPTS / "train.py") for number in (0, 1)]
    seen = reports(finish(nodes))
    assert sorted([s["rank"] for s in node] for node in seen) == [[0, 1], [2, 3]]
    assert {s["sum"] for node in seen for s in node} == {10.0}
    assert sorted(s["paddle"]["PADDLE_NNODES"] for node in seen for s in node) == ["2"] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("number", "how"), [(1, signal.SIGKILL), (0, signal.SIGTERM)])
def test_a_launcher_that_ends_ends_the_job_on_the_other_machine(number, how, machines):
    nodes = [machines.launch(n, *machines.way(n), SCRIPTS / "fail.py", "loop") for n in (0, 1)]
    pids = [pids_in(node.stdout.readline())[0] for node in nodes]
    if machines.apart and how == signal.SIGKILL:
        assert heard(machines, 1, pids[1]) == ["192.168.1.3"]  # gloo is not kept on loopback here
    nodes[number].send_signal(how)
    assert all_gone([*pids, *(node.pid for node in nodes)], within=20)
    told = [node.communicate(timeout=patience(TIMEOUT))[1] for node in nodes]
    assert nodes[number].returncode == (128 + how if how == signal.SIGTERM else -how)
    assert nodes[1 - number].returncode == 1, told
    assert f"dpfuse.launch: rank {1 - number} (pid {pids[1 - number]}) raised" in told[1 - number]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "how"), [(0, signal.SIGTERM), (1, signal.SIGTERM), (0, signal.SIGUSR1)])
def test_a_signal_to_one_launcher_lets_ranks_of_both_machines_save_and_end(number, how, machines):
    nodes = [machines.launch(n, *machines.way(n), SCRIPTS / "stop_together.py", 0) for n in (0, 1)]
    pids = [pids_in(node.stdout.readline())[0] for node in nodes]
    began = time.monotonic()
    nodes[number].send_signal(how)
    told = [node.communicate(timeout=patience(TIMEOUT)) for node in nodes]
    assert time.monotonic() - began < patience(15)  # no launcher waits for one that has left
    (first,) = re.findall(r"rank 0 stopped in (step \d+: .*)\n", told[0][0])
    assert re.fullmatch(rf"step \d+: rank {number} got {how.name}", first)
    assert told[1][0] == f"rank 1 stopped in {first}\n"
    assert [node.returncode for node in nodes] == [0, 0]
    assert all("dpfuse.launch: the ranks have stopped together" in text for _, text in told), told
    assert all_gone(pids, within=1)


@pytest.mark.slow
def test_a_rank_that_fails_on_one_machine_is_named_there(machines):
    nodes = [machines.launch(n, *machines.way(n), SCRIPTS / "fail.py", "raise") for n in (0, 1)]
    told = [node.communicate(timeout=patience(TIMEOUT)) for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], told
    assert "dpfuse.launch: rank 1 (pid " in told[1][1]
    assert "raised ValueError: planted" in told[1][1]
    assert "dpfuse.launch: rank 0 (pid " in told[0][1]
    assert all_gone(pids_in(told[0][0] + told[1][0]), within=1)
